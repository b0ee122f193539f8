"""The grouped matrix product that the schemes share.

    plan.py, rule.py   launch parameters as data, and the rule that chooses them (no Triton)
    schedule.py        which rows a program works on
    tile_kernel.py     tiles on the tensor cores
    combine_kernel.py  finishes an up product whose k loop was split
    spread.py          quantises rows straight into the sorted order
    epilogue.py        activations in registers
    launch.py          the host side
    workspaces.py      scratch memory
    rows_moe.py        a whole layer of one-byte elements with scales per row or tensor; rows.py, rows_launch.py
    hopper.py          its products on sm_90 with many rows per expert; hopper_*.py
    specimen.py        launches recorded, so that every kernel compiles for every target without a GPU

A scheme writes how its operands are loaded and scaled (`moe_fp8.kernels.block` is the model) and nothing else.
Importing this package imports no Triton; `launch` and the kernels do.
"""
