"""Grouped GEMMs, and the fused MoE layer that the schemes share.

    fused/             the pipeline (`layer.py`), activation schemes, weights of scaled_mm
    plan.py            launch configurations as data (no Triton)
    heuristics/        which of them a layer gets, for all families
    launch.py          GEMMs by the tile kernel: the host side
    tile_kernel.py     tiles on the tensor cores, their epilogue, the reduction of gemm1 where its k loop was split
    schedule.py        which rows a program works on
    scaled_mm.py       8-bit elements with scales that do not change along k; quantize_rows.py
    gemv.py            the layer for few tokens, whose pairs are not sorted; scaled_gemv.py, that of 8-bit elements
    hopper.py          the warp-specialised kernel of sm_90, for many rows per expert; hopper_*.py
    qdq.py             activations that are quantised and dequantised, for products in bfloat16
    lora.py            what adapters add to both GEMMs
    marlin/            mixed_input, repacked at load: 16-bit activations beside int4, int8, e4m3, e2m1; and gemv
    as_stored/         mixed_input, weights as stored
    workspaces.py      scratch memory

Experts that run through the layer stand in `moe_core.gemm_experts`.  A scheme writes how its operands are loaded and
scaled (`moe_fp8.kernels.block` is the model) and nothing else.
Importing this package imports no Triton; `launch`, `fused` and the kernels do.
"""
