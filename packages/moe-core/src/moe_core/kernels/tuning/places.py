"""Locations of tuning profiles: a given path, or the user's own file for a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

#: environment variable with a path that replaces the user's own profile
VARIABLE = "MOE_TUNING"


def given_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the path in the environment variable ``MOE_TUNING``.

    Args:
        environ: Environment; that of the process by default.

    Returns:
        The path, or None if the variable is unset or empty.
    """
    text = (os.environ if environ is None else environ).get(VARIABLE, "")
    return Path(text) if text else None


def user_path(gpu: str, environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the path of the user's own profile: ``$XDG_CACHE_HOME/moe-core/tuning/GPU.json``.

    ``~/.cache`` replaces an unset variable.

    Args:
        gpu: Name of the GPU.
        environ: Environment; that of the process by default.

    Returns:
        The path, or None if there is no home directory.
    """
    environ = os.environ if environ is None else environ
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", gpu).strip("_.")
    base = environ.get("XDG_CACHE_HOME", "")
    if not name:
        return None
    try:
        # the XDG specification requires that relative paths are ignored
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "moe-core" / "tuning" / f"{name}.json"
