"""The releases of transformers that this package works with."""

from __future__ import annotations

from moe_core import MoEError
from moe_core.api.engines import VersionRange

#: the range of pyproject.toml
TRANSFORMERS = VersionRange("moe-transformers", "transformers", "5.17", "5.25")


class TransformersVersionError(MoEError, ImportError):
    """A release of transformers that this package was not tested with, and whose inner workings may differ."""


def check_version() -> None:
    """Raise :class:`TransformersVersionError` unless the installed release of transformers is a tested one."""
    reason = TRANSFORMERS.reason_against_version()
    if reason is not None:
        bounds = f">={TRANSFORMERS.lowest},<{TRANSFORMERS.below}"
        raise TransformersVersionError(
            f'{reason}: pip install "transformers{bounds}", or a newer moe-transformers: '
            "pip install --upgrade moe-transformers"
        )
