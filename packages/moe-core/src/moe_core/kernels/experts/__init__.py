"""Base classes of experts that use the fused layer; schemes add claims and `convert`.

The fused layer is in `moe_core.kernels.gemm`.

    grouped      common base: plans, workspaces, the fused layer of some weights, `apply`
    scaled_gemv  8-bit weights and activations; small M without a sort
    scaled_mm    8-bit weights and activations with scales of rows, columns or tensors
    marlin       16-bit activations, weights repacked at load and dequantized in registers; 4- and 8-bit integers

Importing this package does not import Triton.
"""
