"""Write the generated documents: docs/backends.md and docs/performance.md.

The former comes from the claims, the latter from docs/results.

Usage: ``python tools/generate_docs.py --write`` updates them; ``--check`` fails if one is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

import backends_document
import results_document

DOCS = Path(__file__).parent.parent / "docs"
DOCUMENTS = {"backends.md": backends_document.text, "performance.md": results_document.text}


def main(argument: str) -> int:
    """Write or check the documents.

    Args:
        argument: ``--write`` or ``--check``.

    Returns:
        The exit code.
    """
    stale = False
    for name, text in DOCUMENTS.items():
        path, wanted = DOCS / name, text()
        if argument == "--write":
            path.write_text(wanted, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != wanted:
            print(f"{path} is out of date; renew it with: nox -s docs -- --write")
            stale = True
            continue
        print(f"{name}: {'written' if argument == '--write' else 'up to date'}")
    return int(stale)


if __name__ == "__main__":
    if sys.argv[1:] not in (["--write"], ["--check"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
