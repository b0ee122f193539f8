"""What the lowest supported Triton does not compile, and newer ones do."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCES = sorted(Path(__file__).parents[1].glob("packages/*/src/**/*.py"))


def counted_arguments(source: str) -> list[str]:
    """Names of tuples of kernel arguments, as the host makes them, that ``len`` is called of."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    lengths = (call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "len")
    return [name.id for name in lengths if isinstance(name, ast.Name) and name.id.endswith("_args")]


def test_no_device_function_counts_its_arguments() -> None:
    """They may hold a None, and Triton 3.6 has no type for such a tuple; slices without it are counted instead."""
    assert counted_arguments("if len(a_args) <= 3: pass\nif len(a_args[2:4]): pass") == ["a_args"]
    assert len(SOURCES) > 400
    found = {str(path): names for path in SOURCES if (names := counted_arguments(path.read_text()))}
    assert not found
