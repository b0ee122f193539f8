"""FP8 and MXFP8 from 16-bit experts, at load.

Weight scales come from the largest magnitude of what shares them (:mod:`moe_core.reference.quantization`), activations
are quantised at run time.  A name that ends in ``_w8a16`` asks for 16-bit activations; nothing else ever gets them.

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

#: What the scheme fp8 makes of 16-bit experts.
ONLINE = (
    *(OnlineQuantization(name, "fp8", weight, activation) for name, (weight, activation) in _KEYS.items()),
    *(OnlineQuantization(f"{name}_w8a16", "fp8", weight, None) for name, (weight, _) in _KEYS.items()),
)


def quantize_moe_weights(weights: MoEWeights, quantize: str | OnlineQuantization) -> MoEWeights:
    """Canonical 16-bit ``weights`` (bfloat16, float16 or float32) in the canonical form of ``quantize``.

    ``w13`` [E, 2N, K] (or [E, N, K] without a gate) and ``w2`` [E, K, N] become e4m3 codes with scales as in
    :func:`moe_core.spec.weights.scale_shape`; biases are carried through.  On a GPU at the memory's speed.
    Raises TensorError for weights that are quantised already, ConfigError for an unknown name.
    """
    return registry().online(quantize).quantize(weights)
