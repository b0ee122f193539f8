"""Bases of experts that run through the fused layer of `moe_core.kernels.gemm`: claims and `convert` are the schemes'.

    grouped      what all of them share: plans, scratch memory, the fused layer of some weights, `apply`
    scaled_mm    8-bit weights and activations with scales of rows, columns or tensors
    marlin       16-bit activations, weights repacked at load and dequantised in registers; 4- and 8-bit integers

Importing this package imports no Triton.
"""
