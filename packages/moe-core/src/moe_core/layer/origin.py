"""Where a layer came from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_core.checkpoint import Checkpoint, Given
    from moe_core.spec.quant_key import QuantKey


@dataclass(frozen=True)
class LayerOrigin:
    """Where a layer came from, and how it was read.

    Attributes:
        index: Index in its model; None for the first layer with experts.
        activation_key: Activation key that was requested.
        stack: Stack of layers in the model, if it has several.
        given: Settings that were requested.
        routing_reason: Why the layer has no routing, if it has none.
    """

    index: int | None
    activation_key: QuantKey | str | None = "checkpoint"
    stack: str | None = None
    given: Given | None = None
    routing_reason: str | None = None


def opened(path: Checkpoint | str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint from a path; return a Checkpoint as it is.

    Args:
        path: Folder, or an open checkpoint.

    Returns:
        The open checkpoint.
    """
    from moe_core.checkpoint import Checkpoint

    return path if isinstance(path, Checkpoint) else Checkpoint.open(path)
