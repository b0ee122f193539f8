"""The pip command that adds a package of this project, from wherever this moe-core came.

pip records where it took a distribution from (``direct_url.json``: a folder, a wheel, a repository); the other packages
lie beside it there.  Without a record it came from an index, and so do they.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def pip_command(package: str, *, upgrade: bool = False) -> str:
    """The command that installs ``package`` ("moe-fp8"), e.g. ``pip install ./packages/moe-fp8`` in a clone."""
    source = _beside_core(package) or package
    return f"pip install {'--upgrade ' if upgrade else ''}{source}"


def how_to_install(package: str, *, upgrade: bool = False) -> str:
    """:func:`pip_command` for a sentence; says what a clone needs too, where this installation does not tell."""
    command = pip_command(package, upgrade=upgrade)
    return command if _beside_core(package) else f"{command} (in a clone: pip install ./packages/{package})"


def _beside_core(package: str) -> str | None:
    """What to hand to pip, None where moe-core's origin is not recorded or has no such package."""
    record = _origin()
    url = record.get("url")
    if not isinstance(url, str):
        return None
    revision = record.get("vcs_info")
    if isinstance(revision, dict):
        inside, _, own = str(record.get("subdirectory", "")).rpartition("/")
        place = f"{revision.get('vcs')}+{url}@{revision.get('commit_id')}#subdirectory={inside}/{package}"
        return shlex.quote(f"{package} @ {place}") if own == "moe-core" else None
    parts = urlsplit(url)
    if parts.scheme != "file":
        return None
    folder = Path(unquote(parts.path)).parent
    if "dir_info" not in record:
        wheels = sorted(folder.glob(f"{package.replace('-', '_')}-*.whl"))
        return _argument(wheels[-1]) if wheels else None
    if not (folder / package / "pyproject.toml").is_file():
        return None
    editable = isinstance(record["dir_info"], dict) and record["dir_info"].get("editable") is True
    return ("-e " if editable else "") + _argument(folder / package)


def _argument(path: Path) -> str:
    """``path`` for a command line, relative where it lies below the current folder; pip takes no bare name as one."""
    here = Path.cwd()
    return shlex.quote(f"./{path.relative_to(here)}" if path.is_relative_to(here) else str(path))


def _origin() -> dict[str, Any]:
    """What pip recorded of this moe-core."""
    try:
        text = importlib.metadata.distribution("moe-core").read_text("direct_url.json")
        found = json.loads(text) if text else {}
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
