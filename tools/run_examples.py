"""Run the Python examples of documents.

Usage: ``python tools/run_examples.py FILE.md ...``. Every fenced ``python`` block runs, in order, with one namespace
per document. A block that cannot run anywhere is preceded by the comment ``<!-- not run: reason -->`` and is only
compiled. A fenced block without a language after a Python block is its expected output; "…" in it matches anything.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(
    r"(<!-- not run: [^>]+ -->\n+)?^```python\n(.*?)^```$(?:\n+^```\n(.*?)^```$)?", re.DOTALL | re.MULTILINE
)


def run(path: Path) -> int:
    """Run the blocks of one document.

    Args:
        path: The document.

    Returns:
        Number of blocks.

    Raises:
        ValueError: A block's output differs from the document.
    """
    text = path.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    count = 0
    for count, match in enumerate(BLOCK.finditer(text), 1):  # noqa: B007 - the number of the last one is the result
        line = text[: match.start(2)].count("\n")
        # Leading empty lines make tracebacks point into the document.
        code = compile("\n" * line + match.group(2), str(path), "exec")
        if match.group(1) is not None:
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        wanted = (match.group(3) or "…").replace("…", "...")
        if not doctest.OutputChecker().check_output(wanted, printed.getvalue(), doctest.ELLIPSIS):
            raise ValueError(f"{path}:{line + 1}: the example prints\n{printed.getvalue()}")
    return count


def main(paths: list[Path]) -> None:
    """Run every document in a separate folder; an exception ends the process with a traceback.

    Args:
        paths: The documents.
    """
    for name, path in [(path, path.resolve()) for path in paths]:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            count = run(path)
        if count:
            print(f"{name}: {count} examples run")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
