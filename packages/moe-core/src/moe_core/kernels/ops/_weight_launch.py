"""Launch parameters of the kernels in `_weight_kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops._sizes import power_of_two
from moe_core.kernels.ops._weight_kernels import (
    block_kernel,
    matrix_amax_kernel,
    matrix_codes_kernel,
    pair_kernel,
    run_kernel,
)
from moe_core.spec.numerics import is_e8m0

#: values per program of the kernels that traverse whole matrices, and steps of the one that only reads
_CHUNK = 4096
_STEPS = 8


#: values per program of `run_kernel`, and of each of its threads
_RUN_VALUES = 2048
_RUN_THREAD_VALUES = 32
#: values per thread of `block_kernel`: many, since the maximum of a block costs the same for each thread
_BLOCK_THREAD_VALUES = 128


def launch_runs(w: Tensor, out: Tensor, scale: Tensor, *, size: int, code: str) -> None:
    """Launch `run_kernel` on contiguous ``w``: one scale per ``size`` consecutive values."""
    runs, tile = w.numel() // size, power_of_two(size)
    rows = max(1, min(_RUN_VALUES // tile, power_of_two(runs)))
    kind = "e8m0" if is_e8m0(scale.dtype) else "float32"
    launch(
        run_kernel,
        (-(-runs // rows),),
        w,
        out,
        scale.view(torch.uint8) if kind == "e8m0" else scale,
        runs,
        size,
        ROWS=rows,
        TILE=tile,
        CODE=code,
        SCALE=kind,
        num_warps=max(1, min(16, rows * tile // (32 * _RUN_THREAD_VALUES))),
        enable_fp_fusion=False,
    )


def launch_pairs(w: Tensor, out: Tensor, scale: Tensor, *, size: int) -> None:
    """Launch `pair_kernel` on contiguous ``w``: one scale per ``size`` consecutive values."""
    runs = w.numel() // size
    rows = max(1, min(_RUN_VALUES // size, power_of_two(runs)))
    launch(
        pair_kernel,
        (-(-runs // rows),),
        w,
        out,
        scale.view(torch.uint8),
        runs,
        SIZE=size,
        ROWS=rows,
        num_warps=max(1, rows * size // (32 * _RUN_THREAD_VALUES)),
        enable_fp_fusion=False,
    )


def launch_blocks(w: Tensor, out: Tensor, scale: Tensor, *, parts: int, row: int, col: int, code: str) -> None:
    """Launch `block_kernel` on contiguous ``w`` [E, rows, K].

    One program handles a block of ``row`` x ``col``.
    """
    experts, rows, cols = w.shape
    part_rows = rows // parts
    grid_rows, grid_cols = -(-part_rows // row), -(-cols // col)
    tile_rows, tile_cols = power_of_two(row), power_of_two(col)
    kind = "e8m0" if is_e8m0(scale.dtype) else "float32"
    # addresses of columns that are loaded one by one occupy as many registers as the values
    held = _BLOCK_THREAD_VALUES if cols % 16 == 0 else _BLOCK_THREAD_VALUES // 4
    launch(
        block_kernel,
        (experts * parts * grid_rows * grid_cols,),
        w,
        out,
        scale.view(torch.uint8) if kind == "e8m0" else scale,
        part_rows,
        cols,
        grid_rows,
        grid_cols,
        ROW=row,
        COL=col,
        TILE_ROWS=tile_rows,
        TILE_COLS=tile_cols,
        CODE=code,
        SCALE=kind,
        num_warps=max(2, min(16, tile_rows * tile_cols // (32 * held))),
        enable_fp_fusion=False,
    )


def launch_matrices(w: Tensor, out: Tensor, scale: Tensor, *, parts: int, code: str) -> None:
    """Quantize each of the ``parts`` matrices with one scale, in two launches.

    ``w`` [E, rows, K] is contiguous.
    """
    matrices = w.shape[0] * parts
    count = w.numel() // matrices
    bits = torch.zeros(matrices, dtype=torch.int32, device=w.device)
    chunks = -(-count // (_CHUNK * _STEPS))
    launch(matrix_amax_kernel, (matrices * chunks,), w, bits, count, chunks, BLOCK=_CHUNK, STEPS=_STEPS, num_warps=8)
    chunks = -(-count // _CHUNK)
    launch(
        matrix_codes_kernel,
        (matrices * chunks,),
        w,
        out,
        scale,
        bits,
        count,
        chunks,
        BLOCK=_CHUNK,
        CODE=code,
        num_warps=8,
        enable_fp_fusion=False,
    )
