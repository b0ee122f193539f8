"""Finds phrases in documents, docstrings and comments for which the field has a better word.

Usage: ``python tools/check_prose.py [PATH …]`` (default: the whole repository). Prints ``file:line: phrase (write …)``
and exits with 1 if it finds any. Only phrases that are wrong in every context are listed.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

_COMPARED = "longer|more|less|fewer|better|slower|faster|worse|smaller|larger|different"
_BRITISH = "quantis|dequantis|requantis|initialis|specialis|synchronis|recognis|parametris|optimis|serialis"

#: pattern -> what to write instead
PHRASES = {
    # "there is no …" is English, also where a line begins with the verb
    rf"(?<!there )(?<=\S )\b(?:is|are) no (?!{_COMPARED})[a-z]\w*": "is not a valid …, there is no …",
    r"\bbeside\b": "next to, compared with, in addition to",
    r"\bof (?:its|their) own(?=[.,;:)]|$)": "a separate …, its own …",
    r"\bin vain\b": "timed out",
    r"\blies? anyhow\b": "unaligned",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bso many\b": "the number of",
    r"\bwhat is left of\b": "the remainder of",
    # arguments may have such names
    rf"\b(?:{_BRITISH})\w+\b(?!:)": "American spelling: -ize",
    r"\b(?:behaviour|colour|licence|neighbour|favour|centre|grey)\w*": "American spelling",
}
_PATTERN = re.compile("|".join(f"({pattern})" for pattern in PHRASES), re.IGNORECASE)
#: code and quoted values, which are what they are
_CODE = re.compile(r"``[^`]*``|`[^`]*`|[\"][^\"]*[\"]")


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line of prose: of Markdown outside code, or docstrings and comments of Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            elif not fenced:
                yield number, re.sub(r"\]\([^)]*\)", "]", line)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is None:
                continue
            first = node.body[0]
            lines = text.splitlines()[first.lineno - 1 : first.end_lineno]
            yield from enumerate(lines, first.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def findings(paths: list[Path]) -> Iterator[str]:
    """``file:line: phrase (write …)`` of everything that is found."""
    instead = list(PHRASES.values())
    for path in paths:
        for number, line in prose_of(path):
            for match in _PATTERN.finditer(_CODE.sub("", line)):
                hint = instead[(match.lastindex or 1) - 1]
                yield f"{path.relative_to(ROOT)}:{number}: {match.group()!r} (write: {hint})"


def default_paths() -> list[Path]:
    """Documents, and the sources of the packages, tools and examples."""
    generated = {ROOT / "docs" / "backends.md", ROOT / "docs" / "performance.md"}
    patterns = (
        "*.md",
        "docs/**/*.md",
        "packages/*/*.md",
        "packages/*/src/**/*.py",
        "tools/*.py",
        "examples/*/src/**/*.py",
    )
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)} - generated)


def main(arguments: list[str]) -> int:
    """The command line; the exit code."""
    found = list(findings([Path(argument).resolve() for argument in arguments] or default_paths()))
    print("\n".join(found) if found else "no phrase of the list is found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
