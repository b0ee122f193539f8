"""Finds tests that match a sentence of an error message instead of its type and the name it reports.

Usage: ``python tools/check_matches.py [PATH …]`` (default: every test of the repository). Prints
``file:line: pattern`` and exits with 1 if a ``match=`` of ``pytest.raises`` or ``pytest.warns`` contains three or more
words. The exception's type states the kind of error, so a pattern contains the name of the argument, setting or tensor
and at most one value. Messages can then be reworded without changing tests.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: number of words from which a pattern is a sentence
SENTENCE = 3
#: escapes of regular expressions, whose letters do not count as words
_ESCAPE = re.compile(r"\\[A-Za-z]|\(\?[a-z:=!<]+")
_WORD = re.compile(r"[A-Za-z]{2}")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def words_of(pattern: str) -> list[str]:
    """Words of a regular expression: what spaces separate and contains letters."""
    return [word for word in _ESCAPE.sub(" ", pattern).split() if _WORD.search(word)]


def rows_of(names: list[str], values: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Name and value of each variable in rows that are written as a list or tuple."""
    for row in values.elts if isinstance(values, (ast.List, ast.Tuple)) else []:
        if isinstance(row, ast.Call):  # pytest.param
            yield from zip(names, row.args, strict=False)
        else:
            columns = row.elts if len(names) > 1 and isinstance(row, (ast.Tuple, ast.List)) else [row]
            yield from zip(names, columns, strict=False)


def variables(function: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Name and value of what ``pytest.mark.parametrize``, loops over literals and assignments give to a test."""
    for decorator in getattr(function, "decorator_list", []):
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("parametrize"):
            names = ast.literal_eval(decorator.args[0])
            split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            yield from rows_of(split, decorator.args[1])
    for node in ast.walk(function):
        if isinstance(node, ast.For):
            yield from rows_of(ast.unparse(node.target).strip("()").split(", "), node.iter)
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))


def texts_of(node: ast.expr, parameters: list[tuple[str, ast.expr]]) -> Iterator[tuple[int, str]]:
    """Line and text of each string in an expression; a variable stands for all its values."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.lineno, node.value
    elif isinstance(node, ast.JoinedStr):
        parts = (str(part.value) if isinstance(part, ast.Constant) else "" for part in node.values)
        yield node.lineno, "".join(parts)
    elif isinstance(node, ast.Name):
        for name, value in parameters:
            if name == node.id and not isinstance(value, ast.Name):
                yield from texts_of(value, [])
    elif isinstance(node, ast.Dict):
        for value in node.values:
            yield from texts_of(value, [])
    elif isinstance(node, ast.Subscript):
        yield from texts_of(node.value, parameters)
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from texts_of(child, parameters)


def findings(paths: list[Path]) -> Iterator[str]:
    """``file:line: pattern`` of every ``match=`` that contains a sentence."""
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = set()
        for function in (tree, *(node for node in ast.walk(tree) if isinstance(node, Function))):
            parameters = list(variables(function))
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                for keyword in call.keywords:
                    if keyword.arg == "match":
                        texts = texts_of(keyword.value, parameters)
                        found |= {(line, text) for line, text in texts if len(words_of(text)) >= SENTENCE}
        for line, text in sorted(found):
            yield f"{path.relative_to(ROOT)}:{line}: {text!r}"


def default_paths() -> list[Path]:
    """Every test, and the tests that the conformance kit offers."""
    patterns = ("packages/*/tests/**/*.py", "packages/*/src/**/testing/**/*.py", "tests/**/*.py", "examples/**/*.py")
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def main(arguments: list[str]) -> int:
    """The command line; the exit code."""
    found = list(findings([Path(argument).resolve() for argument in arguments] or default_paths()))
    hint = "match the argument's name and at most one value"
    print("\n".join([*found, f"{len(found)} patterns are sentences: {hint}"]) if found else "no pattern is a sentence")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
