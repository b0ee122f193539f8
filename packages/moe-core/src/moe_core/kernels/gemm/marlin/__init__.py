"""mixed_input, repacked at load time: weights dequantized in registers, 16-bit activations.

At load time, 4- and 8-bit weights are put into the order in which tensor-core registers hold them. There, a few
instructions per word turn them into 16-bit values; no value passes through shared memory. Schemes define the element
type (`dequant`) and the layout of its scales (`MarlinMatrix`). They share everything else.

    integers   4- and 8-bit codes
    weight     the weight as the tile kernel takes it
    gemv       the layer for few tokens, without tiles: integer dot products (`integer_dot`), or `mma.sync`

The order of codes, their conversion, dequantization and tiles are in `moe_core.kernels.gemm.fragments`. The
warp-specialized kernel of 4-bit words is `moe_core.kernels.gemm.sm90.mixed_input`.

The name is that of the first kernel of this kind (Frantar et al., 2024, arXiv:2408.11743).
"""
