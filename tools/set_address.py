"""Writes the address of the repository wherever the project states it.

Usage: ``python tools/set_address.py https://HOST/OWNER/NAME``.  Until the project is published it has none, and states
one under ``.invalid``, a name that is reserved for being nobody's (RFC 2606).  The packages' ``[project.urls]`` and
CITATION.cff hold it; ``tests/test_packaging.py`` finds places that differ.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def places() -> list[Path]:
    """The files that state the address."""
    return [ROOT / "CITATION.cff", *sorted(ROOT.glob("packages/*/pyproject.toml"))]


def address() -> str:
    """The address that the packages state."""
    project = tomllib.loads((ROOT / "packages/moe-core/pyproject.toml").read_text())["project"]
    return str(project["urls"]["Homepage"])


def main(new: str) -> None:
    """Replaces the address in every place."""
    if not new.startswith("https://") or new.endswith("/"):
        sys.exit(f"{new}: expected https://HOST/OWNER/NAME, without a slash at its end")
    old = address()
    for path in places():
        path.write_text(path.read_text().replace(old, new))
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1])
