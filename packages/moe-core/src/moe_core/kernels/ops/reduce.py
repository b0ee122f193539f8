"""Weighted sum over the top-k slots of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.kernels.launch.launch import launch

#: two programs of 1024 columns for each of 132 SMs
_FEW_PROGRAMS = 264


def reduce_pairs(
    y: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    out: Tensor,
    *,
    topk_weights: Tensor | None = None,
    expert_map: Tensor | None = None,
    rows: Tensor | None = None,
    split_k: int = 1,
    pdl: bool = False,
) -> Tensor:
    """Compute the weighted sum over the top-k slots of each token.

    ``out[m] = sum_j topk_weights[m, j] * y[m * k + j]``. Launches the Triton kernel. The sum is computed in float32
    over ascending slots, so it is the same on every run. Pairs without a local expert (see `moe_core.kernels.ops.sort`)
    are not read and add nothing.

    Args:
        y: Results of the pairs [M * k, K], any float dtype, contiguous columns. With ``split_k`` partial sums per pair,
            [M * k * split_k, K].
        topk_ids: Expert ids [M, k], contiguous.
        num_experts: Number of local experts.
        out: Output [M, K], any float dtype, contiguous columns.
        topk_weights: Router weights [M, k], float32, contiguous; None if they are already applied.
        expert_map: Local expert number of each global id [E global].
        rows: Row of ``y`` for each pair [M * k], int32. ``y`` then has any number of rows.
        split_k: Number of partial sums per pair.
        pdl: Use programmatic dependent launch. Only ``y`` may come from the previous launch; ids and ``expert_map``
            must be older.

    Returns:
        ``out``.
    """
    import triton

    from moe_core.kernels.ops._reduce_kernels import reduce_kernel

    tokens, columns = out.shape
    if tokens == 0 or columns == 0:
        return out
    # few tokens: smaller blocks give more programs, each of which loads fewer bytes
    largest = 256 if tokens * triton.cdiv(columns, 1024) < _FEW_PROGRAMS else 1024
    block = min(triton.next_power_of_2(columns), largest)
    launch(
        reduce_kernel,
        (tokens, triton.cdiv(columns, block)),
        y,
        topk_ids,
        expert_map,
        topk_weights,
        rows,
        out,
        columns,
        num_experts if expert_map is None else expert_map.numel(),
        num_experts,
        y.stride(0),
        out.stride(0),
        TOP_K=topk_ids.shape[1],
        SPLIT_K=split_k,
        HAS_MAP=expert_map is not None,
        HAS_WEIGHTS=topk_weights is not None,
        BLOCK=block,
        pdl=pdl,
        num_warps=4 if block >= 1024 else 2,
        enable_fp_fusion=False,  # product and sum round separately, as in the PyTorch reference
    )
    return out


def reduce_pairs_torch(
    y: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    out: Tensor,
    *,
    topk_weights: Tensor | None = None,
    expert_map: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Compute `reduce_pairs` in PyTorch, on any device.

    Args:
        y: As in `reduce_pairs`, without ``split_k``.
        topk_ids: As in `reduce_pairs`.
        num_experts: As in `reduce_pairs`.
        out: As in `reduce_pairs`.
        topk_weights: As in `reduce_pairs`.
        expert_map: As in `reduce_pairs`.
        rows: As in `reduce_pairs`.

    Returns:
        ``out``.
    """
    ids = topk_ids.long()
    num_ids = num_experts if expert_map is None else expert_map.numel()
    known = (ids >= 0) & (ids < num_ids)
    if expert_map is not None:
        local = expert_map.long()[torch.where(known, ids, 0)]
        known &= (local >= 0) & (local < num_experts)
    if rows is not None:
        # an empty y implies that no pair has a local expert
        y = y[torch.where(known.flatten(), rows.long(), 0)] if len(y) else y.new_zeros(len(rows), y.shape[1])
    values = y.view(*topk_ids.shape, y.shape[1]).float()
    if topk_weights is not None:
        values = values * topk_weights[..., None]
    values = torch.where(known[..., None], values, 0.0)
    total = torch.zeros(out.shape, dtype=torch.float32, device=y.device)
    for slot in range(topk_ids.shape[1]):
        total += values[:, slot]
    return out.copy_(total)
