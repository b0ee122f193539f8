"""What groups of columns demand of a layer's sizes."""

from __future__ import annotations

from moe_core import FusedMoEConfig, QuantKey


def group_reasons(config: FusedMoEConfig, weight_key: QuantKey | None) -> list[str]:
    """Reasons against weights whose groups of columns don't fill the matrices' rows; for ``extra_reasons``."""
    size = -1 if weight_key is None else weight_key.group_size
    if size <= 0:
        return []
    return [
        f"needs {name} to be a multiple of the weights' group of {size} columns, got {length}"
        for name, length in (("hidden_size", config.hidden_size), ("intermediate_size", config.intermediate_size))
        if length % size
    ]
