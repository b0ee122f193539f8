"""A fused MoE layer whose codes become numbers in registers, from plain tensors to plain tensors.

    sort      pairs by expert; beside it x is written in the order of `codes.arrange`, or quantised by token too
    up        h = act(x w13^T), in that order too
    down      y[pair] = weight * (h w2^T)
    reduce    out[token] = sum over slots of y, in float32

Where x and h have factors they are first multiplied by them, pair by pair, and then written in that order; h is
quantised by a launch of its own.  In the batched format rows arrive grouped, and the down product writes the output.
With few tokens the k loops may be split among programs; a further launch then finishes h.  All scratch memory is the
caller's (`portable_workspaces`), nothing is read before it is written, and there is no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from moe_core.gemm import rows
from moe_core.gemm.launch import (
    Activation,
    Operand,
    Result,
    Routing,
    TileFunctions,
    combine_parts,
    grouped_product,
    is_aligned,
    weight_descriptor,
)
from moe_core.gemm.plan import TileConfig, TilePlan
from moe_core.gemm.rows_launch import InUse, ordered_rows, quantize_rows, routed_pairs
from moe_core.gemm.tile_kernel import PAIR, POSITION, TOKEN
from moe_core.gemm.workspaces import order_workspaces, parts_workspace
from moe_core.ops.batch import Batch, BatchedRows, batch_rows
from moe_core.ops.reduce import reduce_pairs
from moe_core.ops.sort import QuantizeRows, SortedPairs, sort_pairs, whole_row
from moe_core.workspace import WorkspaceSpec
from torch import Tensor

from moe_wna16.kernels import codes

#: depth of a step; rows of x and h are padded to whole ones
STEP = 128
#: columns within which activations change places, or a multiple
UNIT = 32
#: depth where columns have groups of their own, and of float32 products, which no matrix unit computes
SHORT_STEP = 32


@dataclass(frozen=True, eq=False)
class CodeMatrix:
    """One of the two weights of a layer's experts.

    - ``words`` int32 [E, rows, words], rows of ``columns`` codes of ``bits``, low bits first
    - ``scales`` [E, groups, rows] bfloat16, float16 or float32, ``zero_points`` of that shape, uint8 or int16: without
      them the middle code; ``group_size`` columns share one, -1: all of a row; a ``step`` has 1, 2 or 4 of them
    - ``column_groups`` int32 [E, columns padded to 128], in the order of `codes.arrange`: the group of each column
    - ``pre_scale`` float32 [E, columns]: factors of the activations' columns
    - ``bias`` [E, rows], any float dtype
    - ``step``: columns of a step of the k loop, 128 or 32
    """

    words: Tensor
    bits: int
    columns: int
    group_size: int
    scales: Tensor
    zero_points: Tensor | None = None
    column_groups: Tensor | None = None
    pre_scale: Tensor | None = None
    bias: Tensor | None = None
    step: int = STEP

    def operand(self, count: int) -> Operand:
        """What the kernel gets; ``count`` rows of one half."""
        words, scales, groups = self.words, self.scales, self.column_groups
        device = (
            words,
            scales,
            self.zero_points,
            groups,
            words.stride(0),
            words.stride(1),
            words.shape[2],
            scales.stride(0),
            scales.stride(1),
            0 if groups is None else groups.stride(0),
            scales.shape[1],
        )
        make = weight_descriptor(words)
        descriptor = None if make is None else partial(_descriptor, make, 32 // self.bits)
        return Operand(device, count, self.columns, self.bias, descriptor, is_aligned(words))

    def functions(self, quantized: bool) -> TileFunctions:
        """The device functions, for activations that are ``quantized`` by token or not."""
        open_a = rows.open_values if quantized else codes.open_plain
        load_a, four = rows.load_values, self.bits == 4
        finish = codes.finish_tokens if quantized else None
        if self.column_groups is not None:
            load = codes.load_columns_4 if four else codes.load_columns_8
            return TileFunctions(open_a, load_a, codes.open_columns, load, codes.multiply_columns, finish)
        if self.group_size == -1:
            load = codes.load_rows_4 if four else codes.load_rows_8
            finish = codes.finish_rows_tokens if quantized else codes.finish_rows
            return TileFunctions(open_a, load_a, codes.open_rows, load, codes.multiply_rows, finish)
        load_a, load, multiply = _GROUPS[self.bits, self.step // self.group_size]
        return TileFunctions(open_a, load_a, codes.open_groups, load, multiply, finish)


#: load_a, load_b and multiply by bits and groups of a step
_GROUPS = {
    (4, 1): (rows.load_values, codes.load_groups_4x1, codes.multiply_group),
    (4, 2): (codes.load_halves, codes.load_groups_4x2, codes.multiply_two_groups),
    (4, 4): (codes.load_quarters, codes.load_groups_4x4, codes.multiply_four_groups),
    (8, 1): (rows.load_values, codes.load_groups_8x1, codes.multiply_group),
    (8, 2): (codes.load_halves, codes.load_groups_8x2, codes.multiply_two_groups),
    (8, 4): (codes.load_quarters, codes.load_groups_8x4, codes.multiply_four_groups),
}


def _descriptor(make: Any, packed: int, block_rows: int, block_columns: int) -> Any:
    return make(block_rows, block_columns // packed)


def _padded(columns: int) -> int:
    return -(-columns // STEP) * STEP


def portable_workspaces(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    *,
    quantized: bool = False,
    pre_scaled: bool = False,
    batched: bool = False,
) -> tuple[WorkspaceSpec, ...]:
    """Scratch tensors of `portable_fused_moe` for at most ``num_tokens`` tokens, or T_max of the batched format.

    ``dtype`` of x and the output; ``quantized``: activations are quantised by token; ``pre_scaled``: they have factors.
    """
    tokens = num_experts * num_tokens if batched else num_tokens
    pairs = tokens if batched else num_tokens * top_k
    entering = pairs if pre_scaled else tokens
    apart = quantized or pre_scaled
    # 16 bits of float16 do not hold what an activation may make
    wide = torch.float32 if quantized and dtype is torch.float16 else dtype
    stored = torch.bfloat16 if quantized else dtype
    inner = _padded(intermediate_size)
    return (
        *order_workspaces(pairs, num_tokens, num_experts, batched),
        WorkspaceSpec("multiplied", (pairs if pre_scaled else 0, max(hidden_size, intermediate_size)), wide),
        WorkspaceSpec("x_values", (entering, _padded(hidden_size)), stored),
        WorkspaceSpec("x_scales", (entering if apart else 0,), torch.float32),
        WorkspaceSpec("h", (pairs if apart else 0, inner), wide),
        WorkspaceSpec("h_values", (pairs, inner), stored),
        WorkspaceSpec("h_scales", (pairs if apart else 0,), torch.float32),
        parts_workspace(batched, STEP),
        WorkspaceSpec("y", (0 if batched else pairs, hidden_size), dtype),
    )


@dataclass(frozen=True, eq=False)
class _Layer:
    """One call."""

    w13: CodeMatrix
    w2: CodeMatrix
    size: int
    routing: Routing | Batch
    plan: TilePlan
    activation: Activation
    workspace: Mapping[str, Tensor]
    quantized: bool

    def arranger(self, matrix: CodeMatrix, values: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
        """Device function and arguments that make ``values`` of rows."""
        if self.quantized:
            return codes.round_4, (values,)
        return (codes.arrange_4 if matrix.bits == 4 else codes.arrange_8), (values,)

    def run(self, x: Tensor, out: Tensor) -> None:
        """out [M, K]; batched: [E * T_max, K]."""
        routing, work, pdl = self.routing, self.workspace, self.plan.pdl
        values, found = work["x_values"], work["x_scales"]
        quantize, arguments = self.arranger(self.w13, values)
        job = None
        if self.w13.pre_scale is None:
            group = whole_row(values.shape[1]) if self.quantized else UNIT
            job = QuantizeRows(x, values, found if self.quantized else None, quantize, group, arguments)
        order = self.order(job)
        place = POSITION if isinstance(routing, Batch) else TOKEN
        if job is None:
            self.enter(x, self.w13, order, values, found, by_token=True)
            place = POSITION if isinstance(routing, Batch) else PAIR
        h_place = self.up_product(values, found, order, place.value)
        y, split = out, self.plan.down.split
        if isinstance(routing, Routing):
            y = work["y"]
            if split > 1:
                y = work["parts"][: routing.num_pairs * split * y.shape[1]].view(-1, y.shape[1])
        self.product(
            self.plan.down, self.w2, out.shape[1], work["h_values"], work["h_scales"], order, Result(y), h_place, None
        )
        if isinstance(routing, Routing):
            reduce_pairs(y, routing.ids, routing.num_experts, out, expert_map=routing.expert_map, split=split, pdl=pdl)

    def order(self, job: QuantizeRows | None) -> SortedPairs | BatchedRows:
        routing, plan, work = self.routing, self.plan, self.workspace
        if isinstance(routing, Batch):
            return batch_rows(routing, plan.block_m, workspace=work, rows=job, pdl=plan.pdl)
        return sort_pairs(
            routing.ids,
            routing.num_experts,
            plan.block_m,
            workspace=work,
            expert_map=routing.expert_map,
            rows=job,
            pdl=plan.pdl,
        )

    def enter(
        self,
        x: Tensor,
        matrix: CodeMatrix,
        order: SortedPairs | BatchedRows,
        values: Tensor,
        scales: Tensor,
        *,
        by_token: bool,
    ) -> None:
        """Rows of ``x``, of tokens or of pairs, as ``values`` of pairs: times their factors, quantised, in order."""
        routing, pairs, pdl = self.routing, self.routing.num_pairs, self.plan.pdl
        x = x[:, : matrix.columns]
        if matrix.pre_scale is not None:
            from moe_core.gemm.marlin.columns import gather_columns

            room = self.workspace["multiplied"].flatten()[: pairs * matrix.columns].view(pairs, matrix.columns)
            gather_columns(x, room, routing, by_token=by_token, index=None, factor=matrix.pre_scale, pdl=pdl)
            x = room
        in_use: InUse = ordered_rows(order, routing) if isinstance(routing, Batch) else routed_pairs(routing)
        quantize, arguments = self.arranger(matrix, values)
        quantize_rows(x[:pairs], values[:pairs], scales, quantize, arguments, in_use, pdl=pdl)

    def up_product(self, values: Tensor, scales: Tensor, order: SortedPairs | BatchedRows, place: int) -> int:
        """h in h_values and h_scales; which row of them a row of a tile is."""
        work, routing, config = self.workspace, self.routing, self.plan.up
        by_pair = isinstance(routing, Routing)
        apart = self.quantized or self.w2.pre_scale is not None
        if apart:
            h = Result(work["h"])
        else:
            quantize, arguments = self.arranger(self.w2, work["h_values"])
            h = Result(work["h_values"], None, quantize, arguments)
        split = config.split > 1 and isinstance(routing, Routing)
        target = h
        if split:
            width = self.w13.words.shape[1]
            target = Result(work["parts"][: routing.num_pairs * config.split * width].view(-1, width))
        out_rows = PAIR.value if apart and by_pair else None
        self.product(config, self.w13, self.size, values, scales, order, target, place, self.activation, out_rows)
        if split and isinstance(routing, Routing):
            combine_parts(
                parts=target.values,
                split=config.split,
                bias=self.w13.bias,
                out=h,
                routing=routing,
                activation=self.activation,
                columns=self.size,
                block=STEP,
                pdl=self.plan.pdl,
            )
        if apart:
            self.enter(work["h"], self.w2, order, work["h_values"], work["h_scales"], by_token=False)
        which: int = (PAIR if by_pair and (split or apart) else POSITION).value
        return which

    def product(
        self,
        config: TileConfig,
        matrix: CodeMatrix,
        count: int,
        values: Tensor,
        scales: Tensor,
        order: SortedPairs | BatchedRows,
        out: Result,
        place: int,
        activation: Activation | None,
        out_rows: int | None = None,
    ) -> None:
        stride = values.stride(0)
        grouped_product(
            matrix.functions(self.quantized),
            config,
            a=(values, scales, stride, 1, 0) if self.quantized else (values, stride),
            b=matrix.operand(count),
            out=out,
            pairs=order,
            routing=self.routing,
            activation=activation,
            block_k=matrix.step,
            pdl=self.plan.pdl,
            a_rows=place,
            out_rows=out_rows,
        )


def portable_fused_moe(
    x: Tensor,
    w13: CodeMatrix,
    w2: CodeMatrix,
    *,
    out: Tensor,
    workspace: Mapping[str, Tensor],
    plan: TilePlan,
    activation: Activation,
    quantized: bool = False,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    expert_num_tokens: Tensor | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> None:
    """Write the layer's output to ``out`` [M, K]: sum over slots of weight * (w2 act(w13 x + b13) + b2).

    - ``x`` [M, K] bfloat16, float16 or float32, columns contiguous, any row stride; ``out`` [M, K] likewise
    - ``w13`` gate rows, then up rows (without a gate: N rows)
    - ``quantized``: x and h are quantised to e4m3, one float32 scale per row
    - ``topk_ids`` [M, k] int32 or int64, ``topk_weights`` [M, k] float32, both contiguous; an id that is negative, too
      large, or mapped by ``expert_map`` [E global] int32 to no local expert adds nothing
    - or, batched: ``expert_num_tokens`` [E] int32; ``x`` and ``out`` [E, T_max, K], rows beyond an expert's number are
      neither read nor written, and results are not weighted
    - ``workspace``: the tensors of `portable_workspaces`, by name, for at least M tokens
    - ``plan``: of transposed tiles, 128 columns wide
    - ``apply_router_weight_on_input``: weights multiply the first product, before its bias (k = 1)
    """
    experts, rows_of_half = w13.words.shape[0], w13.words.shape[1] // (2 if activation.gated else 1)
    routing: Routing | Batch
    if expert_num_tokens is not None:
        routing = Batch(expert_num_tokens, x.shape[1])
        x, out = x.flatten(0, 1), out.flatten(0, 1)
    elif topk_ids is not None and topk_weights is not None:
        routing = Routing(topk_ids, topk_weights, experts, expert_map, apply_router_weight_on_input)
    else:
        raise TypeError("either topk_weights and topk_ids or expert_num_tokens are needed")
    if x.shape[0]:
        _Layer(w13, w2, rows_of_half, routing, plan, activation, workspace, quantized).run(x, out)
