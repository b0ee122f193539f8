"""How long the sums of products of codes may be that int32 holds exactly."""

from __future__ import annotations

from moe_core import FusedMoEConfig, QuantKey

_LARGEST = 2**31 - 1


def sum_reasons(config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None) -> list[str]:
    """Reasons against sums over whole rows that int32 may not hold; for ``extra_reasons``.

    The largest product is that of a weight of -128 (of int4: 16 times -8) and an activation of -128, or of 255 codes
    from its zero point.
    """
    if weight_key is None or weight_key.group_size > 0 or activation_key is None:
        return []
    longest = _LARGEST // (128 * (128 if activation_key.symmetric else 255))
    return [
        f"needs {name} to be at most {longest}, which int32 sums exactly, got {length}"
        for name, length in (("hidden_size", config.hidden_size), ("intermediate_size", config.intermediate_size))
        if length > longest
    ]
