"""Online INT8 quantization of 16-bit experts, at load.

There is one weight scale per output channel, ``max(amax, 1e-10) / 127`` (:mod:`moe_core.reference.quantization`): an
all-zero channel has a scale and codes 0. Only names that end in ``_w8a16`` use 16-bit activations.

======================  =========================================
name                    activations
======================  =========================================
int8_per_channel        int8, one scale per token
int8_per_channel_w8a16  16 bits
======================  =========================================
"""

from __future__ import annotations

from moe_core import MoEWeights, OnlineQuantization, kInt8DynamicTokenSym, kInt8StaticChannelSym, registry

#: Online quantizations of the int8 scheme.
ONLINE = (
    OnlineQuantization("int8_per_channel", "int8", kInt8StaticChannelSym, kInt8DynamicTokenSym),
    OnlineQuantization("int8_per_channel_w8a16", "int8", kInt8StaticChannelSym, None),
)


def quantize_moe_weights(weights: MoEWeights, quantize: str | OnlineQuantization = "int8_per_channel") -> MoEWeights:
    """Quantize canonical 16-bit weights; runs at memory bandwidth on a GPU.

    Args:
        weights: bfloat16, float16 or float32, with ``w13`` [E, 2N, K] (or [E, N, K] if ungated) and ``w2`` [E, K, N].
        quantize: name of an online quantization, or the quantization itself.

    Returns:
        int8 codes with scales [E, rows, 1]; biases are passed through.

    Raises:
        TensorError: the weights are already quantized.
        ConfigError: unknown name.
    """
    return registry().online(quantize).quantize(weights)
