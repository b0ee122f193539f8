"""A fused MoE layer whose int8 weights are widened in registers (W8A16), from plain tensors to plain tensors.

    sort      pairs by expert
    up        h = act(x w13^T), in the dtype of x
    down      y[pair] = weight * (h w2^T)
    reduce    out[token] = sum over slots of y, in float32

In the batched format rows arrive grouped, and the down product writes the output.  With few tokens the k loops may be
split among programs; a further launch then finishes h.  All scratch memory is the caller's, nothing is read before it
is written, and there is no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from moe_core.gemm import rows
from moe_core.gemm.launch import Activation, Operand, Result, Routing, TileFunctions, combine_parts, grouped_product
from moe_core.gemm.plan import TilePlan
from moe_core.gemm.rows_launch import row_operand
from moe_core.gemm.tile_kernel import PAIR, POSITION, TOKEN
from moe_core.gemm.workspaces import order_workspaces, parts_workspace
from moe_core.ops.batch import Batch, BatchedRows, batch_rows
from moe_core.ops.reduce import reduce_pairs
from moe_core.ops.sort import SortedPairs, sort_pairs
from moe_core.workspace import WorkspaceSpec
from torch import Tensor

from moe_int8.kernels import wide

#: depth of a step, and columns of a tile
BLOCK = 128


def wide_workspaces(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    *,
    batched: bool = False,
) -> tuple[WorkspaceSpec, ...]:
    """Scratch tensors of `wide_fused_moe` for at most ``num_tokens`` tokens, or T_max of the batched format."""
    pairs = num_experts * num_tokens if batched else num_tokens * top_k
    return (
        *order_workspaces(pairs, num_tokens, num_experts, batched),
        WorkspaceSpec("h", (pairs, -(-intermediate_size // BLOCK) * BLOCK), dtype),
        parts_workspace(batched, BLOCK),
        WorkspaceSpec("y", (0 if batched else pairs, hidden_size), dtype),
    )


def wide_fused_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    w13_scale: Tensor,
    w2_scale: Tensor,
    out: Tensor,
    workspace: Mapping[str, Tensor],
    plan: TilePlan,
    activation: Activation,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    expert_num_tokens: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> None:
    """Write the layer's output to ``out`` [M, K]: sum over slots of weight * (w2 act(w13 x + b13) + b2).

    - ``x`` [M, K] bfloat16, float16 or float32, columns contiguous, any row stride; ``out`` [M, K] likewise
    - ``w13`` [E, 2N, words of K] (gate rows, then up rows; [E, N, words] without a gate), ``w2`` [E, K, words of N]
      int32, as `moe_int8.layout.order_words` makes them
    - ``w13_scale`` [E, 2N, 1], ``w2_scale`` [E, K, 1] float32
    - ``topk_ids`` [M, k] int32 or int64, ``topk_weights`` [M, k] float32, both contiguous; an id that is negative, too
      large, or mapped by ``expert_map`` [E global] int32 to no local expert adds nothing
    - or, batched: ``expert_num_tokens`` [E] int32; ``x`` and ``out`` [E, T_max, K], rows beyond an expert's number are
      neither read nor written, and results are not weighted
    - ``workspace``: the tensors of `wide_workspaces`, by name, for at least M tokens
    - ``plan``: of transposed tiles, 128 columns wide
    - ``w13_bias`` [E, 2N] or [E, N], ``w2_bias`` [E, K], any float dtype
    - ``apply_router_weight_on_input``: weights multiply the first product, before its bias (k = 1)
    """
    experts, size, hidden = w13.shape[0], w13.shape[1] // (2 if activation.gated else 1), w2.shape[1]
    routing: Routing | Batch
    order: SortedPairs | BatchedRows
    if expert_num_tokens is not None:
        routing = Batch(expert_num_tokens, x.shape[1])
        x, out = x.flatten(0, 1), out.flatten(0, 1)
        if x.shape[0] == 0:
            return
        order = batch_rows(routing, plan.block_m, workspace=workspace, pdl=plan.pdl)
        first = POSITION
    elif topk_ids is not None and topk_weights is not None:
        if x.shape[0] == 0:
            return
        routing = Routing(topk_ids, topk_weights, experts, expert_map, apply_router_weight_on_input)
        order = sort_pairs(topk_ids, experts, plan.block_m, workspace=workspace, expert_map=expert_map, pdl=plan.pdl)
        first = TOKEN
    else:
        raise TypeError("either topk_weights and topk_ids or expert_num_tokens are needed")

    def functions(load: object) -> TileFunctions:
        opened = (rows.open_weights, wide.load_words)
        return TileFunctions(wide.open_activations, load, *opened, wide.multiply, wide.finish)

    def operand(words: Tensor, scale: Tensor, bias: Tensor | None, count: int, columns: int) -> Operand:
        return row_operand(words, scale, bias, count, columns=columns, packed=4)

    h, split = workspace["h"], plan.up.split
    up = operand(w13, w13_scale, w13_bias, size, hidden)
    target, second = h, POSITION
    if split > 1 and isinstance(routing, Routing):
        width, second = w13.shape[1], PAIR
        target = workspace["parts"][: routing.num_pairs * split * width].view(-1, width)
    grouped_product(
        functions(wide.load_activations),
        plan.up,
        a=(x, x.stride(0), hidden),
        b=up,
        out=Result(target),
        pairs=order,
        routing=routing,
        activation=activation,
        block_k=BLOCK,
        pdl=plan.pdl,
        a_rows=first.value,
    )
    if split > 1 and isinstance(routing, Routing):
        combine_parts(
            parts=target,
            split=split,
            bias=up.bias,
            out=Result(h),
            routing=routing,
            activation=activation,
            columns=size,
            block=BLOCK,
            pdl=plan.pdl,
        )
    y, split = out, plan.down.split
    if isinstance(routing, Routing):
        y = workspace["y"]
        if split > 1:
            y = workspace["parts"][: routing.num_pairs * split * hidden].view(-1, hidden)
    grouped_product(
        functions(wide.load_padded),
        plan.down,
        a=(h, h.stride(0), size),
        b=operand(w2, w2_scale, w2_bias, hidden, size),
        out=Result(y),
        pairs=order,
        routing=routing,
        activation=None,
        block_k=BLOCK,
        pdl=plan.pdl,
        a_rows=second.value,
    )
    if isinstance(routing, Routing):
        reduce_pairs(y, routing.ids, routing.num_experts, out, expert_map=routing.expert_map, split=split, pdl=plan.pdl)
