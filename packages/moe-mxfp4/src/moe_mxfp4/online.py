"""Online MXFP4 quantization of 16-bit experts, at load.

The scale of 32 columns is ``amax / 6`` rounded *up* to a power of two, so that no weight saturates. Codes are rounded
to nearest, ties to even (:mod:`moe_core.reference.quantization`). compressed-tensors, Quark and vLLM round scales
"even", which lets weights between 6 and 7 times the scale saturate.

===============  ====================================
name             activations
===============  ====================================
mxfp4            16 bits
mxfp4_mxfp8      e4m3, e8m0, one per token and 32
mxfp4_fp8        e4m3, one scale per token
===============  ====================================
"""

from __future__ import annotations

from moe_core import MoEWeights, OnlineQuantization, kFp8DynamicTokenSym, kMxfp4Static, kMxfp8Dynamic, registry

#: Online quantizations of the mxfp4 scheme.
ONLINE = (
    OnlineQuantization("mxfp4", "mxfp4", kMxfp4Static, None),
    OnlineQuantization("mxfp4_mxfp8", "mxfp4", kMxfp4Static, kMxfp8Dynamic),
    OnlineQuantization("mxfp4_fp8", "mxfp4", kMxfp4Static, kFp8DynamicTokenSym),
)


def quantize_moe_weights(weights: MoEWeights, quantize: str | OnlineQuantization = "mxfp4") -> MoEWeights:
    """Quantize canonical 16-bit weights; runs at memory bandwidth on a GPU if groups are whole.

    Args:
        weights: bfloat16, float16 or float32, with ``w13`` [E, 2N, K] (or [E, N, K] if ungated) and ``w2`` [E, K, N].
        quantize: name of an online quantization, or the quantization itself.

    Returns:
        e2m1 codes, two per byte, with uint8 e8m0 scales [E, rows, ceil(columns/32)]; biases are passed through.

    Raises:
        TensorError: the weights are already quantized.
        ConfigError: unknown name.
    """
    return registry().online(quantize).quantize(weights)
