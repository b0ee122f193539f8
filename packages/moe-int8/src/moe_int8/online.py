"""INT8 from 16-bit experts, at load.

One weight scale per output channel, ``max(amax, 1e-10) / 127`` (:mod:`moe_core.reference.quantization`): a channel of
zeros has a scale and codes 0.  A name that ends in ``_w8a16`` asks for 16-bit activations; nothing else ever gets them.

======================  =========================================
name                    activations
======================  =========================================
int8_per_channel        int8, one scale per token
int8_per_channel_w8a16  16 bits
======================  =========================================
"""

from __future__ import annotations

from moe_core import MoEWeights, OnlineQuantization, kInt8DynamicTokenSym, kInt8StaticChannelSym, registry

#: What the scheme int8 makes of 16-bit experts.
ONLINE = (
    OnlineQuantization("int8_per_channel", "int8", kInt8StaticChannelSym, kInt8DynamicTokenSym),
    OnlineQuantization("int8_per_channel_w8a16", "int8", kInt8StaticChannelSym, None),
)


def quantize_moe_weights(weights: MoEWeights, quantize: str | OnlineQuantization = "int8_per_channel") -> MoEWeights:
    """Canonical 16-bit ``weights`` (bfloat16, float16 or float32) in the canonical form of ``quantize``.

    ``w13`` [E, 2N, K] (or [E, N, K] without a gate) and ``w2`` [E, K, N] become int8 codes with scales [E, rows, 1];
    biases are carried through.  On a GPU at the memory's speed.
    Raises TensorError for weights that are quantised already, ConfigError for an unknown name.
    """
    return registry().online(quantize).quantize(weights)
