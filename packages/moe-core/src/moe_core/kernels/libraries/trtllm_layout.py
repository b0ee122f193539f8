"""Weights and scales in the layout that FlashInfer's TRTLLM kernels read.

The layout is a single row order, computed once per shape and applied in one pass:

- Gated kernels take up and gate rows interleaved: up 0, gate 0, up 1, … (block FP8: all up rows, then all gate rows).
- Within blocks of b = 32 rows (16 for epilogue tiles of 64 rows), row i of the result is row
  ``(i % 8) * (b / 8) + i / 8`` of the source. The rows that one tensor-core thread holds are then contiguous.
- Block scales follow their rows, then are stored in tiles of 128 rows and 4 columns, in which rows 32 apart are
  neighbors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.errors import TensorError
from moe_core.kernels.ops.layout import block_major, by_experts, pad_matrices, permute_rows


def shuffled_rows(rows: int, tile: int) -> Tensor:
    """Return the row shuffle for an epilogue tile.

    Args:
        rows: Number of rows.
        tile: Rows of the epilogue tile, 64 or 128.

    Returns:
        Source row of each row [rows], int64.

    Raises:
        TensorError: If the number of rows is not a multiple of the block.
    """
    block = 32 if tile % 128 == 0 else 16
    if rows % block:
        raise TensorError(f"the matrix has {rows} rows, expected a multiple of {block}")
    return torch.arange(rows, device="cpu").view(-1, 8, block // 8).transpose(1, 2).flatten()


def up_gate_rows(rows: int, *, in_turns: bool) -> Tensor:
    """Return the row order that puts up before gate, for a matrix of gate rows and then up rows.

    Args:
        rows: Number of rows.
        in_turns: Interleave up and gate rows; otherwise all up rows come first.

    Returns:
        Source row of each row [rows], int64.
    """
    gate, up = torch.arange(rows, device="cpu").view(2, -1)
    return torch.stack((up, gate), dim=1 if in_turns else 0).flatten()


def trtllm_row_order(rows: int, tile: int, *, gated: bool = False, in_turns: bool = True) -> Tensor:
    """Return the row order of a whole matrix.

    Args:
        rows: Number of rows.
        tile: Rows of the epilogue tile, 64 or 128.
        gated: Whether the matrix is a canonical w13 with gate and up.
        in_turns: Interleave up and gate rows; otherwise all up rows come first.

    Returns:
        Source row of each row [rows], int64.
    """
    order = shuffled_rows(rows, tile)
    return up_gate_rows(rows, in_turns=in_turns)[order] if gated else order


def trtllm_weights(w: Tensor, order: Tensor, rows: int, cols: int, *, parts: int = 1) -> Tensor:
    """Pad each of the stacked matrices with zeros, and reorder the rows.

    Padding works on a few experts at a time, so that only one full copy is made.

    Args:
        w: Weights [E, parts * R, C].
        order: Source row of each row.
        rows: Rows per matrix after padding.
        cols: Columns after padding.
        parts: Number of stacked matrices.

    Returns:
        Weights [E, parts * rows, cols].
    """
    index = order.to(w.device)
    if tuple(w.shape[1:]) == (parts * rows, cols):
        return permute_rows(w, index)

    def step(given: Tensor, target: Tensor) -> None:
        permute_rows(pad_matrices(given, rows, cols, parts=parts), index, out=target)

    return by_experts(step, w, w.new_empty(w.shape[0], parts * rows, cols))


def trtllm_block_weights(w: Tensor, order: Tensor, block: int = 128) -> Tensor:
    """Reorder the rows and convert to block-major layout.

    Args:
        w: Weights [E, rows, K].
        order: Source row of each row.
        block: Columns per block.

    Returns:
        Weights [E, K / block, rows, block].
    """
    return block_major(w, block, index=order.to(w.device))


def trtllm_scales(scale: Tensor, order: Tensor) -> Tensor:
    """Reorder the rows of block scales, and store them in tiles of 128 rows and 4 columns.

    Args:
        scale: Scales [E, rows, groups], e8m0 or bfloat16; ``rows`` is a multiple of 128 and ``groups`` of 4.
        order: Source row of each row.

    Returns:
        Scales of the same shape and dtype, with elements in the order of the tiles.

    Raises:
        TensorError: If the shape is not a multiple of the tile.
    """
    experts, rows, groups = scale.shape
    if rows % 128 or groups % 4:
        raise TensorError(f"scales have shape {list(scale.shape)}, expected multiples of 128 rows and 4 columns")
    tiles = permute_rows(scale, order.to(scale.device)).view(experts, rows // 128, 4, 32, groups // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).contiguous().view(experts, rows, groups)
