"""Grouped GEMMs, and the fused MoE layer that the schemes share.

Each folder's first line states the hardware it is for. From bottom to top:

    plan.py         launch configurations as data (no Triton)
    heuristics/     which of them a layer gets, for all families
    workspaces.py   scratch memory
    tiles/          the portable tile kernel
    fragments/      weights in fragment order, dequantized in registers
    sm90/           warp-specialized Hopper kernels
    fused/          the pipeline of a layer (`layer.py`), activation schemes, weights of scaled_mm
    gemv/           the layer for few tokens, without tiles
    marlin/         mixed_input: 16-bit activations, weights of 4 and 8 bits in fragment order
    as_stored/      mixed_input: weights as stored in the checkpoint

Experts that run through the layer are in `moe_core.kernels.experts`. A scheme writes how its operands are loaded and
scaled (`moe_fp8.kernels.block` is the model) and nothing else.
"""
