"""Supported transformers versions."""

from __future__ import annotations

from moe_core import MoEError
from moe_core.api.engines import VersionRange

#: the version range of pyproject.toml
TRANSFORMERS = VersionRange("moe-transformers", "transformers", "5.17", "5.25")


class TransformersVersionError(MoEError, ImportError):
    """The transformers version is untested and its internals may differ."""


def check_version() -> None:
    """Raise :class:`TransformersVersionError` for an untested transformers version."""
    reason = TRANSFORMERS.reason_against_version()
    if reason is not None:
        bounds = f">={TRANSFORMERS.lowest},<{TRANSFORMERS.below}"
        raise TransformersVersionError(
            f'{reason}: pip install "transformers{bounds}", or a newer moe-transformers: '
            "pip install --upgrade moe-transformers"
        )
