"""Each floor of the packages imports only floors below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(ROOT.glob("packages/*/src/*"))

#: what a folder of moe_core must not import
ABOVE = {
    "jit": ("ops", "gemm", "libraries", "checkpoint", "cli", "testing", "kernel", "layer", "oracle", "registry"),
    "ops": ("gemm", "libraries", "checkpoint", "cli", "testing", "kernel", "layer", "oracle", "registry"),
    "gemm": ("libraries", "checkpoint", "cli", "testing", "kernel", "layer", "oracle", "registry"),
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


@pytest.mark.parametrize("folder", ["checkpoint"])
def test_no_circle_within_a_folder(folder: str) -> None:
    """Modules of one folder can be read in some order, each after what it imports, types included."""
    core = ROOT / "packages/moe-core/src/moe_core"
    modules = {f"moe_core.{folder}.{path.stem}": path for path in sorted((core / folder).glob("[!_]*.py"))}
    needs = {name: {found for _, found in imports(path) if found in modules} for name, path in modules.items()}
    assert any(needs.values())
    try:
        tuple(TopologicalSorter(needs).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
