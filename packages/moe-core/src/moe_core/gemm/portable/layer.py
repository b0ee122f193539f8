"""A fused MoE layer whose codes become numbers in registers, from plain tensors to plain tensors.

    sort      pairs by expert; beside it x is written in the order of `tiles.arrange`, quantised where it is
    up        h = act(x w13^T), in that order too
    down      y[pair] = weight * (h w2^T)
    reduce    out[token] = sum over slots of y, in float32

Where x and h have factors they are first multiplied by them, pair by pair, and then written in that order; h with a
scale per row is quantised by a launch of its own, and so is x with a scale per expert, once for each of a token's.  In
the batched format rows arrive grouped, and the down product writes the output.  With few tokens the k loops may be
split among programs; a further launch then finishes h.  All scratch memory is the caller's (`portable_workspaces`),
nothing is read before it is written, and there is no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_core.errors import TensorError
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
from moe_core.gemm.portable import activations
from moe_core.gemm.portable.kinds import ActivationKind
from moe_core.gemm.rows_launch import InUse, ordered_rows, quantize_rows, routed_pairs
from moe_core.gemm.spread import spread_rows
from moe_core.gemm.tile_kernel import PAIR, POSITION, TOKEN
from moe_core.gemm.workspaces import order_workspaces, parts_workspace
from moe_core.ops.batch import Batch, BatchedRows, batch_rows
from moe_core.ops.reduce import reduce_pairs
from moe_core.ops.sort import QuantizeRows, SortedPairs, sort_pairs, whole_row
from moe_core.workspace import WorkspaceSpec

#: depth of a step; rows of x and h are padded to whole ones
STEP = 128
#: columns within which activations change places, or a multiple
UNIT = 32

_QUANTIZE = {
    ActivationKind.TOKEN: activations.round_4,
    ActivationKind.BLOCK: activations.round_4,
    ActivationKind.EXPERT: activations.round_static_4,
    ActivationKind.MXFP8: activations.round_mxfp8_4,
    ActivationKind.MXFP4: activations.round_mxfp4_4,
    ActivationKind.MXFP4_EVEN: activations.round_mxfp4_even_4,
    ActivationKind.MXFP4_DOWN: activations.round_mxfp4_down_4,
    ActivationKind.MXFP8_EVEN: activations.round_mxfp8_even_4,
    ActivationKind.MXFP8_DOWN: activations.round_mxfp8_down_4,
}


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """One of the two weights of a layer's experts.

    - ``words`` int32 (uint8 where ``scaled``) [E, rows, words], rows of ``columns`` codes of ``bits``, 4 or 8, low bits
      first
    - ``device``: the tuple `B` of the device functions, ``functions`` which those are for a kind of activations; see
      `moe_core.gemm.tile_kernel`.  `open_a` and `load_a` are those of `tiles` and `moe_core.gemm.rows`
    - ``bias`` [E, rows], any float dtype
    - ``pre_scale`` float32 [E, columns]: factors of the activations' columns, for kinds PLAIN and TOKEN
    - ``input_scale`` float32 [E], for kind EXPERT
    - ``step``: columns of a step of the k loop, 128 or 32
    - ``scaled``: the device functions multiply e4m3 codes with e8m0 bytes, in their own order, for kind MXFP8
    """

    words: Tensor
    bits: int
    columns: int
    device: tuple[Any, ...]
    functions: Callable[[ActivationKind], TileFunctions]
    bias: Tensor | None = None
    pre_scale: Tensor | None = None
    input_scale: Tensor | None = None
    step: int = STEP
    scaled: bool = False

    def operand(self, count: int) -> Operand:
        """What the kernel gets; ``count`` rows of one half."""
        make = weight_descriptor(self.words)
        descriptor = None if make is None else partial(_descriptor, make, 8 * self.words.element_size() // self.bits)
        return Operand(self.device, count, self.columns, self.bias, descriptor, is_aligned(self.words))

    def quantize(self, kind: ActivationKind, values: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
        """Device function and arguments that make ``values`` of rows."""
        if self.scaled:
            return activations.code_mxfp8, (values,)
        if kind is ActivationKind.PLAIN:
            return (activations.arrange_4 if self.bits == 4 else activations.arrange_8), (values,)
        if self.bits != 4:
            raise TensorError(f"quantised activations go with codes of 4 bits, got {self.bits}")
        if kind is not ActivationKind.EXPERT:
            return _QUANTIZE[kind], (values,)
        if self.input_scale is None:
            raise TensorError("static activations need the input scales of both weights")
        return _QUANTIZE[kind], (values, self.input_scale)


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
    kind: ActivationKind = ActivationKind.PLAIN,
    pre_scaled: bool = False,
    weight_on_input: bool = False,
    scaled: bool = False,
    batched: bool = False,
) -> tuple[WorkspaceSpec, ...]:
    """Scratch tensors of `portable_fused_moe` for at most ``num_tokens`` tokens, or T_max of the batched format.

    ``dtype`` of x and the output; ``pre_scaled``: activations have factors; ``scaled``: as the matrices are.
    """
    tokens = num_experts * num_tokens if batched else num_tokens
    pairs = tokens if batched else num_tokens * top_k
    entering = pairs if pre_scaled or kind is ActivationKind.EXPERT else tokens
    apart, plain = kind is ActivationKind.TOKEN or pre_scaled, kind is ActivationKind.PLAIN
    # 16 bits of float16 do not hold what an activation may make
    wide = torch.float32 if not plain and dtype is torch.float16 else dtype
    stored = torch.float8_e4m3fn if scaled else dtype if plain else torch.bfloat16
    scale = torch.uint8 if scaled else torch.float32
    inner, width = _padded(intermediate_size), _padded(hidden_size)

    def scales(rows: int, columns: int) -> tuple[int, int]:
        if kind is ActivationKind.BLOCK or scaled:
            return rows, columns // (UNIT if scaled else STEP)
        return (rows, 1) if apart else (0, 1)

    return (
        *order_workspaces(pairs, num_tokens, num_experts, batched),
        WorkspaceSpec("multiplied", (pairs if pre_scaled else 0, max(hidden_size, intermediate_size)), wide),
        WorkspaceSpec(
            "x_weighted", (tokens if weight_on_input and kind.weighted_first else 0, hidden_size), torch.float32
        ),
        WorkspaceSpec("x_values", (entering, width), stored),
        WorkspaceSpec("x_scales", scales(entering, width), scale),
        WorkspaceSpec("h", (pairs if apart else 0, inner), wide),
        WorkspaceSpec("h_values", (pairs, inner), stored),
        WorkspaceSpec("h_scales", scales(pairs, inner), scale),
        parts_workspace(batched, STEP),
        WorkspaceSpec("y", (0 if batched else pairs, hidden_size), dtype),
    )


@dataclass(frozen=True, eq=False)
class _Layer:
    """One call."""

    w13: PackedMatrix
    w2: PackedMatrix
    size: int
    routing: Routing | Batch
    plan: TilePlan
    activation: Activation
    workspace: Mapping[str, Tensor]
    kind: ActivationKind

    @property
    def apart(self) -> bool:
        """Whether h is quantised by a launch of its own."""
        return self.kind is ActivationKind.TOKEN or self.w2.pre_scale is not None

    def run(self, x: Tensor, out: Tensor) -> None:
        """out [M, K]; batched: [E * T_max, K]."""
        routing, work, pdl = self.routing, self.workspace, self.plan.pdl
        values, found = work["x_values"], work["x_scales"]
        order, place = self.entered(x, values, found)
        h_place = self.up_product(values, found, order, place)
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

    def entered(self, x: Tensor, values: Tensor, found: Tensor) -> tuple[SortedPairs | BatchedRows, int]:
        """The order, and which row of ``values``, made of ``x``, a row of a tile is."""
        routing, kind, pdl = self.routing, self.kind, self.plan.pdl
        quantize, arguments = self.w13.quantize(kind, values)
        if self.w13.pre_scale is not None:
            order = self.order(None)
            self.enter(x, self.w13, order, values, found, by_token=True)
            return order, (POSITION if isinstance(routing, Batch) else PAIR).value
        group = {ActivationKind.TOKEN: whole_row(values.shape[1]), ActivationKind.BLOCK: STEP}.get(kind, UNIT)
        scaled = kind in (ActivationKind.TOKEN, ActivationKind.BLOCK) or self.w13.scaled
        job = QuantizeRows(x, values, found if scaled else None, quantize, group, arguments)
        if isinstance(routing, Batch):
            return self.order(job), POSITION.value
        if kind is not ActivationKind.EXPERT:
            return self.order(job), TOKEN.value
        order = self.order(None, positions=True)
        if isinstance(order, SortedPairs):
            spread_rows(job, pairs=order, routing=routing, by_expert=True, pdl=pdl)
        return order, POSITION.value

    def order(self, job: QuantizeRows | None, positions: bool = False) -> SortedPairs | BatchedRows:
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
            positions=positions,
            pdl=plan.pdl,
        )

    def enter(
        self,
        x: Tensor,
        matrix: PackedMatrix,
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
        quantize, arguments = matrix.quantize(self.kind, values)
        quantize_rows(x[:pairs], values[:pairs], scales, quantize, arguments, in_use, pdl=pdl)

    def up_product(self, values: Tensor, scales: Tensor, order: SortedPairs | BatchedRows, place: int) -> int:
        """h in h_values and h_scales; which row of them a row of a tile is."""
        work, routing, config = self.workspace, self.routing, self.plan.up
        by_pair = isinstance(routing, Routing)
        apart = self.apart
        if apart:
            h = Result(work["h"])
        else:
            quantize, arguments = self.w2.quantize(self.kind, work["h_values"])
            groups = STEP // UNIT if self.w2.scaled else 1
            found = work["h_scales"] if self.w2.scaled or self.kind is ActivationKind.BLOCK else None
            h = Result(work["h_values"], found, quantize, arguments, groups)
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
        matrix: PackedMatrix,
        count: int,
        values: Tensor,
        scales: Tensor,
        order: SortedPairs | BatchedRows,
        out: Result,
        place: int,
        activation: Activation | None,
        out_rows: int | None = None,
    ) -> None:
        a: tuple[Any, ...] = (values, values.stride(0))
        if self.kind is ActivationKind.TOKEN:
            a = (values, scales, values.stride(0), 1, 0)
        elif self.kind is ActivationKind.EXPERT:
            a = (values, matrix.input_scale, values.stride(0), 0, 1)
        elif self.kind is ActivationKind.BLOCK or matrix.scaled:
            a = (values, scales, values.stride(0), scales.stride(0))
        grouped_product(
            matrix.functions(self.kind),
            config,
            a=a,
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
    w13: PackedMatrix,
    w2: PackedMatrix,
    *,
    out: Tensor,
    workspace: Mapping[str, Tensor],
    plan: TilePlan,
    activation: Activation,
    kind: ActivationKind = ActivationKind.PLAIN,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    expert_num_tokens: Tensor | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> None:
    """Write the layer's output to ``out`` [M, K]: sum over slots of weight * (w2 act(w13 x + b13) + b2).

    - ``x`` [M, K] bfloat16, float16 or float32, columns contiguous, any row stride; ``out`` [M, K] likewise
    - ``w13`` gate rows, then up rows (without a gate: N rows)
    - ``kind``: what x and h are rounded to
    - ``topk_ids`` [M, k] int32 or int64, ``topk_weights`` [M, k] float32, both contiguous; an id that is negative, too
      large, or mapped by ``expert_map`` [E global] int32 to no local expert adds nothing
    - or, batched: ``expert_num_tokens`` [E] int32; ``x`` and ``out`` [E, T_max, K], rows beyond an expert's number are
      neither read nor written, and results are not weighted
    - ``workspace``: the tensors of `portable_workspaces`, by name, for at least M tokens
    - ``plan``: of transposed tiles, 128 columns wide
    - ``apply_router_weight_on_input``: weights multiply x, or the first product before its bias (k = 1)
    """
    experts, rows_of_half = w13.words.shape[0], w13.words.shape[1] // (2 if activation.gated else 1)
    routing: Routing | Batch
    if expert_num_tokens is not None:
        routing = Batch(expert_num_tokens, x.shape[1])
        x, out = x.flatten(0, 1), out.flatten(0, 1)
    elif topk_ids is not None and topk_weights is not None:
        routing = Routing(topk_ids, topk_weights, experts, expert_map, apply_router_weight_on_input)
        if apply_router_weight_on_input and kind.weighted_first:
            x = torch.mul(x, topk_weights, out=workspace["x_weighted"][: x.shape[0]])
            routing = Routing(topk_ids, None, experts, expert_map)
    else:
        raise TypeError("either topk_weights and topk_ids or expert_num_tokens are needed")
    if x.shape[0]:
        _Layer(w13, w2, rows_of_half, routing, plan, activation, workspace, kind).run(x, out)
