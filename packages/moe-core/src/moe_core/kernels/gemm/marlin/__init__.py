"""mixed_input, repacked at load: weights are dequantised in registers and multiplied with 16-bit activations.

Weights of 4 and 8 bits are put at load into the order in which the registers of the tensor cores hold them, and become
16-bit numbers there, by a few instructions on a word: no number passes through shared memory.  Schemes add the element
type (`dequant`) and say how its scales lie (`MarlinMatrix`); everything else is the same for all of them.

    words      the order of codes in words
    dequant    words as 16-bit numbers
    operand    how words, scales and zero points of a tile are loaded, multiplied and scaled
    integers   4- and 8-bit codes
    convert    canonical weights in this layout
    weight     what the tile kernel gets of a weight
    hopper     the warp-specialised kernel of 4-bit words
    gemv       the layer for one token, without tiles: products in integers (`integer_dot`), or by `mma.sync`

The name is that of the first kernel of this kind (Frantar et al., 2024, arXiv:2408.11743).
"""
