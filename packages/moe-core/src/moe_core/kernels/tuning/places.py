"""Where tuning profiles are: given by a path, or the user's own for a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

#: names a path that is taken instead of the user's own profile
VARIABLE = "MOE_TUNING"


def given_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """The path that the environment variable ``MOE_TUNING`` names; None where it is not set, or empty."""
    text = (os.environ if environ is None else environ).get(VARIABLE, "")
    return Path(text) if text else None


def user_path(gpu: str, environ: Mapping[str, str] | None = None) -> Path | None:
    """``$XDG_CACHE_HOME/moe-core/tuning/GPU.json`` (``~/.cache`` without that variable), GPU being its name.

    None where there is no such folder to be named: no home.
    """
    environ = os.environ if environ is None else environ
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", gpu).strip("_.")
    base = environ.get("XDG_CACHE_HOME", "")
    if not name:
        return None
    try:
        # a relative path is to be ignored, says the specification
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "moe-core" / "tuning" / f"{name}.json"
