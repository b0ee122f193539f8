"""pip command that installs another package of this project from the source of moe-core.

pip records the source of a distribution (``direct_url.json``: a folder, a wheel or a repository), and the other
packages are next to it there. Without a record the source is a package index, which has the other packages too.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def pip_command(package: str, *, upgrade: bool = False) -> str:
    """Build the command that installs a package of this project.

    Args:
        package: Name of the distribution, e.g. "moe-fp8".
        upgrade: Add ``--upgrade``.

    Returns:
        The command, e.g. ``pip install ./packages/moe-fp8`` in a clone.
    """
    source = _beside_core(package) or package
    return f"pip install {'--upgrade ' if upgrade else ''}{source}"


def how_to_install(package: str, *, upgrade: bool = False) -> str:
    """Build :func:`pip_command` as part of a sentence.

    If the source of this installation is unknown, the text adds the command for a clone.

    Args:
        package: Name of the distribution, e.g. "moe-fp8".
        upgrade: Add ``--upgrade``.

    Returns:
        The text.
    """
    command = pip_command(package, upgrade=upgrade)
    return command if _beside_core(package) else f"{command} (in a clone: pip install ./packages/{package})"


def _beside_core(package: str) -> str | None:
    """pip argument for ``package`` at the recorded source of moe-core.

    None if there is no record or no such package there.
    """
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
    """``path`` as command-line argument, relative if it is below the current folder.

    The ``./`` is required: pip treats a bare name as a distribution.
    """
    here = Path.cwd()
    return shlex.quote(f"./{path.relative_to(here)}" if path.is_relative_to(here) else str(path))


def _origin() -> dict[str, Any]:
    """pip's record of the source of this moe-core, empty if there is none."""
    try:
        text = importlib.metadata.distribution("moe-core").read_text("direct_url.json")
        found = json.loads(text) if text else {}
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
