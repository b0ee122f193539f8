"""Grouped GEMMs, and the fused MoE layer that all schemes share.

The first line of each folder states the hardware it supports. From bottom to top:

    plan.py         launch configurations as data (no Triton)
    heuristics/     choose a launch configuration per layer, for all kernel families
    workspaces.py   workspace tensors
    tiles/          the portable tile kernel
    fragments/      weights in fragment order, dequantized in registers
    sm90/           warp-specialized Hopper kernels
    fused/          the pipeline of a layer (`layer.py`), activation schemes, weights of scaled_mm
    gemv/           the layer for few tokens, without tiles
    marlin/         mixed_input: 16-bit activations, 4- and 8-bit weights in fragment order
    as_stored/      mixed_input: weights as stored in the checkpoint

Experts that run through the layer are in `moe_core.kernels.experts`. A scheme only defines how its operands are loaded
and scaled; `moe_fp8.kernels.block` is the example to follow.
"""
