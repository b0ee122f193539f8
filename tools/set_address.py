"""Set the repository's address wherever the project states it.

Usage: ``python tools/set_address.py https://HOST/OWNER/NAME``. Until the project is published, it states an address
under ``.invalid``, a reserved name without an owner (RFC 2606). The address is in the packages' ``[project.urls]`` and
in CITATION.cff. ``tests/test_packaging.py`` finds places that differ.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def places() -> list[Path]:
    """Return the files that state the address."""
    return [ROOT / "CITATION.cff", *sorted(ROOT.glob("packages/*/pyproject.toml"))]


def address() -> str:
    """Return the address that the packages state."""
    project = tomllib.loads((ROOT / "packages/moe-core/pyproject.toml").read_text())["project"]
    return str(project["urls"]["Homepage"])


def main(new: str) -> None:
    """Replace the address in every file.

    Args:
        new: The new address.
    """
    if not new.startswith("https://") or new.endswith("/"):
        sys.exit(f"{new}: expected https://HOST/OWNER/NAME, without a slash at its end")
    old = address()
    for path in places():
        path.write_text(path.read_text().replace(old, new))
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1])
