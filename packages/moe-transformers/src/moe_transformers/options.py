"""Options of :func:`moe_transformers.loading` for experts."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core import ParallelGroups, QuantKey


@dataclass(frozen=True)
class Options:
    """Arguments of :func:`moe_core.load_layer` that apply to every layer.

    Attributes:
        backend: name of the backend.
        quantize: online quantization of 16-bit experts.
        activation_key: quantization of the activations.
        groups: groups of the ranks that share the experts.
    """

    backend: str = "auto"
    quantize: str | None = None
    activation_key: QuantKey | str | None = "checkpoint"
    groups: ParallelGroups | None = None
