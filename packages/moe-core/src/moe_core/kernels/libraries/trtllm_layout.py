"""Weights and scales in the order in which FlashInfer's TRTLLM kernels read them.

All of it is one order of rows, found once per shape and applied in one pass:

- gated kernels take up and gate rows in turns: up 0, gate 0, up 1, … (block FP8: all up rows, then all gate rows)
- within blocks of b = 32 rows (16 where a tile of the epilogue has 64), row i of the result is the source's row
  ``(i % 8) * (b / 8) + i / 8``: what one thread of the tensor core holds lies together
- block scales follow their rows, then come in tiles of 128 rows and 4 columns, in which rows 32 apart are neighbours
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.errors import TensorError
from moe_core.kernels.ops.layout import block_major, by_experts, pad_matrices, permute_rows


def shuffled_rows(rows: int, tile: int) -> Tensor:
    """[rows] int64: which row comes where, for an epilogue tile of ``tile`` (64 or 128) rows."""
    block = 32 if tile % 128 == 0 else 16
    if rows % block:
        raise TensorError(f"the matrix has {rows} rows, expected a multiple of {block}")
    return torch.arange(rows, device="cpu").view(-1, 8, block // 8).transpose(1, 2).flatten()


def up_gate_rows(rows: int, *, in_turns: bool) -> Tensor:
    """[rows] int64: from gate rows, then up rows, to up before gate, in halves or in turns."""
    gate, up = torch.arange(rows, device="cpu").view(2, -1)
    return torch.stack((up, gate), dim=1 if in_turns else 0).flatten()


def trtllm_row_order(rows: int, tile: int, *, gated: bool = False, in_turns: bool = True) -> Tensor:
    """[rows] int64: the order of a whole matrix; ``gated``: of canonical w13."""
    order = shuffled_rows(rows, tile)
    return up_gate_rows(rows, in_turns=in_turns)[order] if gated else order


def trtllm_weights(w: Tensor, order: Tensor, rows: int, cols: int, *, parts: int = 1) -> Tensor:
    """``w`` [E, parts * R, C] with zeros below and beside each of the stacked matrices, then in ``order``.

    [E, parts * rows, cols]; padded some experts after the others, so that one copy of all is made.
    """
    index = order.to(w.device)
    if tuple(w.shape[1:]) == (parts * rows, cols):
        return permute_rows(w, index)

    def step(given: Tensor, target: Tensor) -> None:
        permute_rows(pad_matrices(given, rows, cols, parts=parts), index, out=target)

    return by_experts(step, w, w.new_empty(w.shape[0], parts * rows, cols))


def trtllm_block_weights(w: Tensor, order: Tensor, block: int = 128) -> Tensor:
    """[E, K / block, rows, block]: rows in ``order``, then ``block`` columns of all rows together."""
    return block_major(w, block, index=order.to(w.device))


def trtllm_scales(scale: Tensor, order: Tensor) -> Tensor:
    """``scale`` [E, rows, groups] with rows in ``order``, in tiles of 128 rows and 4 columns: [E, rows, groups].

    ``rows`` is a multiple of 128 and ``groups`` of 4; the shape and dtype (e8m0, bfloat16) stay, the elements are in
    the order of the tiles.
    """
    experts, rows, groups = scale.shape
    if rows % 128 or groups % 4:
        raise TensorError(f"scales have shape {list(scale.shape)}, expected multiples of 128 rows and 4 columns")
    tiles = permute_rows(scale, order.to(scale.device)).view(experts, rows // 128, 4, 32, groups // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).contiguous().view(experts, rows, groups)
