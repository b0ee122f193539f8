"""The weighted sum over the top-k slots of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.kernels.launch.launch import launch

#: two programs of 1024 columns for each of 132 multiprocessors
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
    """out[m] = sum over j of topk_weights[m, j] * y[m * k + j], with the Triton kernel.

    ``y`` [M * k, K] and ``out`` [M, K] of any float dtype with contiguous columns, ``topk_ids`` [M, k] contiguous,
    ``topk_weights`` [M, k] float32 contiguous or None for weights already applied.  Sums in float32, slots ascending:
    the same on every run.  With ``split_k`` partial sums per pair ``y`` is [M * k * split_k, K].  A pair of no local
    expert (see `moe_core.kernels.ops.sort`) is not read and adds nothing.  With ``rows`` [M * k] int32, ``y`` has any
    number of rows and pair p is row ``rows[p]``.  ``pdl``: the launch before makes ``y`` alone; ids and
    ``expert_map`` are older.
    """
    import triton

    from moe_core.kernels.ops._reduce_kernels import reduce_kernel

    tokens, columns = out.shape
    if tokens == 0 or columns == 0:
        return out
    # few tokens: more programs, each of which waits for fewer bytes
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
        enable_fp_fusion=False,  # product and sum round by themselves, as in the twin
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
    """The torch twin of `reduce_pairs`, any device."""
    ids = topk_ids.long()
    num_ids = num_experts if expert_map is None else expert_map.numel()
    known = (ids >= 0) & (ids < num_ids)
    if expert_map is not None:
        local = expert_map.long()[torch.where(known, ids, 0)]
        known &= (local >= 0) & (local < num_experts)
    if rows is not None:
        # without rows there is no known pair either
        y = y[torch.where(known.flatten(), rows.long(), 0)] if len(y) else y.new_zeros(len(rows), y.shape[1])
    values = y.view(*topk_ids.shape, y.shape[1]).float()
    if topk_weights is not None:
        values = values * topk_weights[..., None]
    values = torch.where(known[..., None], values, 0.0)
    total = torch.zeros(out.shape, dtype=torch.float32, device=y.device)
    for slot in range(topk_ids.shape[1]):
        total += values[:, slot]
    return out.copy_(total)
