"""Online FP8 and MXFP8 quantization of 16-bit experts, at load.

A weight scale is derived from the largest magnitude in its group (:mod:`moe_core.reference.quantization`). Activations
are quantized at run time. Only names that end in ``_w8a16`` use 16-bit activations.

=====================  =========================================  ======================================
name                   weight scales                              activations
=====================  =========================================  ======================================
fp8_per_tensor         one for gate, up and down of each expert   e4m3, one scale for all tokens
fp8_per_channel        one per output channel                     e4m3, one scale per token
fp8_per_block          one per 128 x 128 block                    e4m3, one scale per token and 128
mxfp8                  e8m0, one per output channel and 32        e4m3, e8m0, one per token and 32
=====================  =========================================  ======================================
"""

from __future__ import annotations

from moe_core import (
    MoEWeights,
    OnlineQuantization,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
    kMxfp8Static,
    registry,
)

_KEYS = {
    "fp8_per_tensor": (kFp8StaticTensorSym, kFp8DynamicTensorSym),
    "fp8_per_channel": (kFp8StaticChannelSym, kFp8DynamicTokenSym),
    "fp8_per_block": (kFp8Static128BlockSym, kFp8Dynamic128Sym),
    "mxfp8": (kMxfp8Static, kMxfp8Dynamic),
}

#: Online quantizations of the fp8 scheme.
ONLINE = (
    *(OnlineQuantization(name, "fp8", weight, activation) for name, (weight, activation) in _KEYS.items()),
    *(OnlineQuantization(f"{name}_w8a16", "fp8", weight, None) for name, (weight, _) in _KEYS.items()),
)


def quantize_moe_weights(weights: MoEWeights, quantize: str | OnlineQuantization) -> MoEWeights:
    """Quantize canonical 16-bit weights; runs at memory bandwidth on a GPU.

    Args:
        weights: bfloat16, float16 or float32, with ``w13`` [E, 2N, K] (or [E, N, K] if ungated) and ``w2`` [E, K, N].
        quantize: name of an online quantization, or the quantization itself.

    Returns:
        e4m3 codes with scales as in :func:`moe_core.spec.roles.scale_shape`; biases are passed through.

    Raises:
        TensorError: the weights are already quantized.
        ConfigError: unknown name.
    """
    return registry().online(quantize).quantize(weights)
