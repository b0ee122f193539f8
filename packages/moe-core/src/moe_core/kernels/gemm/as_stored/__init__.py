"""Weights as stored in the checkpoint, decoded in registers by plain Triton operations.

The checkpoint's bytes are kept and read as 32-bit words. The activations are written once, in a matching column order.
Schemes define how a tile of words is loaded, scaled and multiplied.

    tiles        the column order; words and activations of a tile
    activations  x and h by quantization key: 16-bit, or quantized and multiplied as 16-bit values
    scheme       activations and weights in the form of the fused layer

Importing this package does not import Triton; its modules do.
"""
