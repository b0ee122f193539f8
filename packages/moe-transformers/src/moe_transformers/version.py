"""The releases of transformers that this package works with."""

from __future__ import annotations

import importlib.metadata
import re

from moe_core import MoEError

#: from the first, before the second: the range of pyproject.toml
TESTED = ((5, 17), (5, 24))


class TransformersVersionError(MoEError, ImportError):
    """A release of transformers that this package was not tested with, and whose inner workings may differ."""


def check_version() -> None:
    """Raise :class:`TransformersVersionError` unless the installed release of transformers is a tested one."""
    found = importlib.metadata.version("transformers")
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    first, end = (".".join(map(str, bound)) for bound in TESTED)
    if not TESTED[0] <= numbers < TESTED[1]:
        raise TransformersVersionError(
            f"transformers {found} is installed, moe-transformers is tested with {first} to before {end}: "
            f'pip install "transformers>={first},<{end}", or a newer moe-transformers: '
            "pip install --upgrade moe-transformers"
        )
