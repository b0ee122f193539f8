"""Each floor of the packages imports only floors below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(ROOT.glob("packages/*/src/*"))

#: what a folder of moe_core must not import
ABOVE = {
    "jit": ("ops", "gemm", "libraries", "checkpoint", "cli", "testing", "kernel", "layer", "oracle", "registry"),
    "ops": ("gemm", "libraries", "checkpoint", "cli", "testing", "kernel", "layer", "oracle", "registry"),
    "gemm": ("experts", "gemm_experts", "libraries", "checkpoint", "cli", "testing", "kernel", "layer", "registry"),
    "gemm_experts": ("libraries", "checkpoint", "cli", "testing", "kernel", "layer", "oracle", "registry"),
    "libraries": ("checkpoint", "cli", "testing", "layer", "oracle", "registry"),
    "prepare_finalize": ("gemm", "libraries", "checkpoint", "cli", "testing", "kernel", "layer", "oracle", "registry"),
    "checkpoint": ("gemm", "libraries", "cli", "testing", "kernel", "layer"),
}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of everything that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("floor", ABOVE)
def test_no_floor_imports_one_above(floor: str) -> None:
    core = ROOT / "packages/moe-core/src/moe_core"
    files = sorted((core / floor).rglob("*.py"))
    assert files
    found = [
        f"{path.relative_to(core)}:{line} imports {module}"
        for path in files
        for line, module in imports(path)
        if any(inside(module, f"moe_core.{above}") for above in ABOVE[floor])
    ]
    assert not found


def test_products_do_not_import_the_kit() -> None:
    """What checks packages is no part of them; the command line, which checks for its user, and the kit may."""
    allowed = ("moe_core/testing/", "moe_core/cli/", "moe_core_pytest/")
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for source in SOURCES
        for path in sorted(source.rglob("*.py"))
        if not path.relative_to(source.parent).as_posix().startswith(allowed)
        for line, module in imports(path)
        if inside(module, "moe_core.testing")
    ]
    assert not found


def test_core_imports_no_scheme() -> None:
    schemes = [source.name for source in SOURCES if not source.name.startswith("moe_core")]
    assert schemes
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sorted((ROOT / "packages/moe-core/src").rglob("*.py"))
        for line, module in imports(path)
        if any(inside(module, scheme) for scheme in schemes)
    ]
    assert not found


def module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, Path]:
    return {module_name(path, source): path for source in SOURCES for path in sorted(source.rglob("*.py"))}


def needed(path: Path, files: Mapping[str, Path]) -> set[str]:
    """Modules of ``files`` that one imports, in functions and for types too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in files else node.module for name in names}
    return found & files.keys()


def folder(module: str, path: Path) -> str:
    """The folder of a module; one in the root of ``gemm``, which its families share, stands for itself."""
    found = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return module if found == "moe_core.gemm" else found


def parents(module: str) -> Iterator[str]:
    """The packages around a module."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def circle(needs: dict[str, set[str]]) -> str | None:
    """Names that need each other in turn."""
    try:
        tuple(TopologicalSorter(needs).static_order())
    except CycleError as error:
        return " -> ".join(error.args[1])
    return None


def test_circles_are_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None


def test_no_circle_of_modules() -> None:
    """Modules can be read in some order, each after what it imports.

    Importing a module runs the packages around it: those of another distribution's package count as imported.
    """
    files = modules()
    needs: dict[str, set[str]] = {}
    for name, path in files.items():
        found = needed(path, files)
        around = {
            parent
            for module in found
            for parent in parents(module)
            if parent.partition(".")[0] != name.partition(".")[0]
        }
        needs[name] = (found | around) - {name}
    assert any(needs.values())
    assert circle(needs) is None


def test_no_circle_of_folders() -> None:
    """Nor can folders; modules in the root of a package are none, and stand on any floor."""
    files = modules()
    roots = {source.name for source in SOURCES} - {"moe_core_cli"}
    needs: dict[str, set[str]] = {}
    for name, path in files.items():
        own = folder(name, path)
        if own not in roots:
            needs.setdefault(own, set()).update(folder(module, files[module]) for module in needed(path, files))
    for own, found in needs.items():
        found -= {own, *roots}
    assert any(needs.values())
    assert circle(needs) is None
