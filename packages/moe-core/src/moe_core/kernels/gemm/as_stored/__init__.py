"""Packed codes that become numbers in registers by plain Triton operations: weights as stored.

Checkpoints' bytes stay as they are, read as 32-bit words; the activations are written once in an order of columns that
fits them.  Schemes add how a tile of words is loaded, scaled and multiplied.

    tiles        the order of columns; words and activations of a tile
    activations  what x and h become, by their key: 16-bit, or quantised and multiplied as 16-bit numbers
    scheme       activations and weights as the fused layer takes them

Importing this package imports no Triton; its modules do.
"""
