"""Maximum length of sums of code products that int32 represents exactly."""

from __future__ import annotations

from moe_core import FusedMoEConfig, QuantKey

_LARGEST = 2**31 - 1


def sum_reasons(config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None) -> list[str]:
    """Return reasons against row sums that may overflow int32; for ``extra_reasons``.

    The largest product is that of a weight of -128 (for int4: 16 times -8) and an activation of -128, or 255 codes away
    from its zero point.

    Args:
        config: configuration of the layer.
        weight_key: quantization of the weights.
        activation_key: quantization of the activations.

    Returns:
        One reason for each size that is too long.
    """
    if weight_key is None or weight_key.group_size > 0 or activation_key is None:
        return []
    longest = _LARGEST // (128 * (128 if activation_key.symmetric else 255))
    return [
        f"needs {name} to be at most {longest}, which int32 sums exactly, got {length}"
        for name, length in (("hidden_size", config.hidden_size), ("intermediate_size", config.intermediate_size))
        if length > longest
    ]
