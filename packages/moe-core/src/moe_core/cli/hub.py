"""Models in the local cache of the Hugging Face Hub, by name.

Nothing is downloaded, and huggingface_hub need not be installed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

#: name of a repository on the Hub: owner/name
_NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w.-]{1,96}", re.ASCII)


def is_name(text: str) -> bool:
    """Whether ``text`` looks like the name of a model on the Hub.

    Args:
        text: Possible name.

    Returns:
        True for "owner/name".
    """
    return _NAME.fullmatch(text) is not None and not text.startswith("-")


def cache() -> Path:
    """Return the cache folder, from the environment variables that huggingface_hub reads."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return _expanded(named)
    home = os.environ.get("HF_HOME")
    if home:
        return _expanded(home) / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def snapshot(name: str) -> Path | None:
    """Return the folder of a cached model, or None.

    It is the revision ``main``, or else the newest revision with a config.json.

    Args:
        name: "owner/name".

    Returns:
        The snapshot's folder, which has a config.json; None if there is none.
    """
    try:
        model = cache() / f"models--{name.replace('/', '--')}"
        folders = [config.parent for config in model.glob("snapshots/*/config.json")]
        if not folders:
            return None
        main = model / "refs" / "main"
        revision = main.read_text(encoding="utf-8").strip() if main.is_file() else None
        stated = [folder for folder in folders if folder.name == revision]
        return stated[0] if stated else max(folders, key=lambda folder: folder.stat().st_mtime)
    except (OSError, UnicodeDecodeError):
        # A cache that cannot be read has no models.
        return None


def _expanded(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()
