"""Online INT4 and INT8 quantization of 16-bit experts in groups, at load.

Codes are rounded to nearest (:mod:`moe_core.reference.quantization`), scales are bfloat16. A name states the bits per
code and the columns that share a scale. ``_asym`` means zero points, ``_fp8`` e4m3 activations with one scale per
token. All other names keep 16-bit activations.

==========================================  ==========================================================
names                                       weights
==========================================  ==========================================================
int4_g32, int4_g64, int4_g128               int4, symmetric: ``scale = amax / 7``
int4_per_channel                            the same with one scale per output channel
int4_g32_asym, int4_g64_asym,               int4 with zero points: ``scale = (max - min) / 15``
int4_g128_asym
int8_g32, int8_g64, int8_g128               int8, symmetric: ``scale = amax / 127``
int4_g128_fp8, int4_per_channel_fp8         int4, symmetric, for e4m3 activations
==========================================  ==========================================================

int8 with one scale per output channel is the scheme int8's ``int8_per_channel_w8a16``.
"""

from __future__ import annotations

from moe_core import (
    MoEWeights,
    OnlineQuantization,
    QuantKey,
    kFp8DynamicTokenSym,
    kInt4Static,
    kInt4StaticAsym,
    kInt8Static,
    registry,
)

_GROUPS = {"g32": 32, "g64": 64, "g128": 128, "per_channel": -1}


def _online(kind: str, key: QuantKey, end: str = "", activation: QuantKey | None = None) -> OnlineQuantization:
    """Build the quantization of a ``kind`` such as "int4_g128": the ``key`` in such groups."""
    group = _GROUPS[kind.partition("_")[2]]
    return OnlineQuantization(f"{kind}{end}", "wna16", key.with_group(1, group), activation)


#: Online quantizations of the wna16 scheme.
ONLINE = (
    *(_online(f"int4_{group}", kInt4Static) for group in _GROUPS),
    *(_online(f"int4_{group}", kInt4StaticAsym, "_asym") for group in ("g32", "g64", "g128")),
    *(_online(f"int8_{group}", kInt8Static) for group in ("g32", "g64", "g128")),
    *(_online(f"int4_{group}", kInt4Static, "_fp8", kFp8DynamicTokenSym) for group in ("g128", "per_channel")),
)


def quantize_moe_weights(weights: MoEWeights, quantize: str | OnlineQuantization = "int4_g128") -> MoEWeights:
    """Quantize canonical 16-bit weights.

    Args:
        weights: bfloat16, float16 or float32, with ``w13`` [E, 2N, K] (or [E, N, K] if ungated) and ``w2`` [E, K, N].
        quantize: name of an online quantization, or the quantization itself.

    Returns:
        Unsigned codes with scales [E, rows, groups], and int32 zero points of that shape for ``_asym``. The last group
        of a
        row may be partial. Biases are passed through.

    Raises:
        TensorError: the weights are already quantized.
        ConfigError: unknown name.
    """
    return registry().online(quantize).quantize(weights)
