"""What a caller of :func:`moe_transformers.loading` asks of the experts."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core import ParallelGroups, QuantKey


@dataclass(frozen=True)
class Options:
    """Arguments of :func:`moe_core.load_layer` for every layer: see there.  ``groups`` of the ranks that share them."""

    backend: str = "auto"
    quantize: str | None = None
    activation_key: QuantKey | str | None = "checkpoint"
    groups: ParallelGroups | None = None
