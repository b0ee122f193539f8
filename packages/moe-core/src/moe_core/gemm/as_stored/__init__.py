"""Packed codes that become numbers in registers by plain Triton operations: weights as stored.

Checkpoints' bytes stay as they are, read as 32-bit words; the activations are written once in the order of columns in
which a thread of the tensor cores holds the numbers of a word.  Schemes add how a tile of words is loaded, scaled and
multiplied (`PackedMatrix.functions`); everything else is the same for all of them.

    tiles        the order of columns; words and activations of a tile
    activations  what x and h are rounded to, and how: 16-bit, or quantised and multiplied as 16-bit numbers
    layer        the fused layer
    words        canonical weights as words

Importing this package imports no Triton; `layer` and the kernels do.
"""
