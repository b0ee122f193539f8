"""A fused MoE layer whose weights are widened in registers, from plain tensors to plain tensors.

    sort      pairs by expert; x rounded, where activations are quantised
    up        h = act(x w13^T), in the dtype of x, or rounded too
    down      y[pair] = weight * (h w2^T)
    reduce    out[token] = sum over slots of y, in float32

Where columns are permuted or have factors, x and h are gathered by pair before their products; where groups of columns
were filled up, the products read single columns (`moe_core.gemm.marlin.columns`).  In the batched format
rows arrive grouped, and the down product writes the output.  With few tokens the k loops may be split among programs; a
further launch then finishes h.  All scratch memory is the caller's (`marlin_workspaces`), nothing is read before it is
written, and there is no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_core.gemm.launch import (
    Activation,
    Operand,
    Result,
    Routing,
    TileFunctions,
    combine_parts,
    grouped_product,
    weight_descriptor,
)
from moe_core.gemm.marlin import operand
from moe_core.gemm.marlin.columns import gather_columns
from moe_core.gemm.marlin.rule import MAX_PARTS
from moe_core.gemm.plan import TileConfig, TilePlan
from moe_core.gemm.tile_kernel import PAIR, POSITION, TOKEN
from moe_core.gemm.workspaces import order_workspaces
from moe_core.ops.batch import Batch, BatchedRows, batch_rows
from moe_core.ops.reduce import reduce_pairs
from moe_core.ops.sort import QuantizeRows, SortedPairs, sort_pairs
from moe_core.workspace import WorkspaceSpec

#: depth of a step
STEP = 128


@dataclass(frozen=True, eq=False)
class MarlinMatrix:
    """One of the two weights of a layer's experts.

    - ``words`` int32 [E, rows, words], see `moe_core.gemm.marlin.words`: whole steps of 128 columns; ``bits`` of a code
    - ``outputs``: columns of the result, of one half where gate and up rows lie in turns (``interleaved``)
    - ``columns`` of x or h as the words have them; ``group_size`` of them share a scale, -1: all of a row
    - ``scales`` [E, groups, rows] float32, or int32 with zero points (`moe_core.gemm.marlin.operand`)
    - ``factors`` float32 [E, rows]: multiply the finished sums; or None
    - ``bias`` [E, outputs], of interleaved rows [E, 2 * outputs]: gate, then up; any float dtype
    - ``index`` int32 [E, columns], ``column_factors`` float32 [E, K]: see `gather_columns`
    """

    words: Tensor
    bits: int
    outputs: int
    columns: int
    group_size: int
    scales: Tensor
    factors: Tensor | None = None
    bias: Tensor | None = None
    interleaved: bool = False
    index: Tensor | None = None
    column_factors: Tensor | None = None

    def gathers(self, columns: int) -> bool:
        """Whether activations of so many columns are gathered before the product."""
        return (self.index is not None or self.column_factors is not None) and self.columns == columns

    def indexes(self, columns: int) -> bool:
        """Whether the product reads them column by column."""
        return self.columns != columns

    @property
    def device(self) -> tuple[Any, ...]:
        """The tuple B of the device functions, see `moe_core.gemm.marlin.operand`."""
        words, scales, factors = self.words, self.scales, self.factors
        strides = (words.stride(0), words.stride(1), scales.stride(0), scales.stride(1))
        return words, scales, factors, *strides, 0 if factors is None else factors.stride(0), scales.shape[1]

    def operand(self, activations: Tensor, columns: int) -> Operand:
        """What the tile kernel gets beside ``activations`` [rows, columns].

        Rows that 16-byte copies cannot reach go through registers, so that they count as not aligned.
        """
        sizes = (activations.data_ptr(), activations.stride(0) * activations.element_size())
        aligned = columns % 8 == 0 and not self.indexes(columns) and all(size % 16 == 0 for size in sizes)
        of_words, codes = weight_descriptor(self.words), 32 // self.bits

        def descriptor(block_rows: int, block_columns: int) -> Any:
            return of_words(block_rows, block_columns // codes)

        made = None if of_words is None else descriptor
        return Operand(self.device, self.outputs, self.columns, self.bias, made, aligned, self.interleaved)


#: the tile kernel's open_b, load_b, multiply and finish for a matrix and a tile
Functions = Callable[[MarlinMatrix, TileConfig], tuple[Any, Any, Any, Any]]


@dataclass(frozen=True, eq=False)
class Rounding:
    """How x and h are rounded to a quantised type, and kept as 16-bit numbers that hold it.

    ``quantize``: a device function as `moe_core.gemm.tile_kernel` describes it, without scales; ``group`` of columns
    that it rounds together.
    """

    quantize: Any
    group: int


def marlin_workspaces(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    *,
    batched: bool = False,
    gathered: tuple[int, int] = (0, 0),
    rounded: torch.dtype | None = None,
    weight_on_input: bool = False,
) -> tuple[WorkspaceSpec, ...]:
    """Scratch tensors of `marlin_fused_moe` for at most ``num_tokens`` tokens, or T_max of the batched format.

    ``gathered``: columns of x and of h that are gathered, 0 where they are not (`gather_columns`); ``rounded``: the
    dtype of x and h with a `Rounding`, which needs room for x with its router weights where these are
    ``weight_on_input``.
    """
    rows = num_experts * num_tokens if batched else num_tokens
    pairs = num_experts * num_tokens if batched else num_tokens * top_k
    # at most 16 programs share a loop
    parts = min(MAX_PARTS, 16 * pairs * max(2 * intermediate_size, hidden_size))
    return (
        *order_workspaces(pairs, num_tokens, num_experts, batched),
        WorkspaceSpec("x_weighted", (rows if rounded and weight_on_input else 0, hidden_size), torch.float32),
        WorkspaceSpec("x_rounded", (rows if rounded else 0, _whole(hidden_size)), rounded or dtype),
        WorkspaceSpec("h", (pairs, _whole(intermediate_size)), rounded or dtype),
        WorkspaceSpec("parts", (0 if batched else parts,), torch.float32),
        WorkspaceSpec("y", (0 if batched else pairs, hidden_size), dtype),
        WorkspaceSpec("gathered", (pairs if any(gathered) else 0, _whole(max(gathered))), dtype),
    )


def _whole(columns: int) -> int:
    return -(-columns // STEP) * STEP


def marlin_fused_moe(
    functions: Functions,
    x: Tensor,
    w13: MarlinMatrix,
    w2: MarlinMatrix,
    *,
    out: Tensor,
    workspace: Mapping[str, Tensor],
    plan: TilePlan,
    activation: Activation,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    expert_num_tokens: Tensor | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    rounding: Rounding | None = None,
) -> None:
    """Write the layer's output to ``out`` [M, K]: sum over slots of weight * (w2 act(w13 x + b13) + b2).

    - ``functions`` of the element type
    - ``x`` [M, K] bfloat16, float16 or float32, columns contiguous, any row stride; ``out`` [M, K] likewise
    - ``topk_ids`` [M, k] int32 or int64, ``topk_weights`` [M, k] float32, both contiguous; an id that is negative, too
      large, or mapped by ``expert_map`` [E global] int32 to no local expert adds nothing
    - or, batched: ``expert_num_tokens`` [E] int32; ``x`` and ``out`` [E, T_max, K], rows beyond an expert's number are
      neither read nor written, and results are not weighted
    - ``workspace``: the tensors of `marlin_workspaces`, by name, for at least M tokens
    - ``plan``: of transposed tiles, 128 columns wide
    - ``apply_router_weight_on_input``: weights multiply the first product, before its bias (k = 1); with ``rounding``
      they multiply x
    - ``rounding`` of x and h: both are multiplied in its dtype; columns then are not gathered
    """
    experts, size, hidden = w13.words.shape[0], w13.outputs, w2.outputs
    routing: Routing | Batch
    order: SortedPairs | BatchedRows
    if expert_num_tokens is not None:
        routing = Batch(expert_num_tokens, x.shape[1])
        x, out = x.flatten(0, 1), out.flatten(0, 1)
        if x.shape[0] == 0:
            return
        rows = _rounded(x, workspace, rounding)
        order = batch_rows(routing, plan.block_m, workspace=workspace, rows=rows, pdl=plan.pdl)
        place = POSITION
    elif topk_ids is not None and topk_weights is not None:
        if x.shape[0] == 0:
            return
        routing = Routing(topk_ids, topk_weights, experts, expert_map, apply_router_weight_on_input)
        if rounding is not None and apply_router_weight_on_input:
            # before x is rounded: the weight would move its steps
            x = torch.mul(x, topk_weights, out=workspace["x_weighted"][: x.shape[0]])
            routing = Routing(topk_ids, None, experts, expert_map)
        rows = _rounded(x, workspace, rounding)
        order = sort_pairs(
            topk_ids, experts, plan.block_m, workspace=workspace, expert_map=expert_map, rows=rows, pdl=plan.pdl
        )
        place = TOKEN
    else:
        raise TypeError("either topk_weights and topk_ids or expert_num_tokens are needed")
    if rows is not None and rows.values is not None:
        x = rows.values
    quantize = None if rounding is None else rounding.quantize
    by_pair = isinstance(routing, Routing)
    if w13.gathers(hidden):
        x = _gathered(x, w13, routing, workspace, by_token=True, pdl=plan.pdl)
        place = PAIR if by_pair else POSITION
    h, split = workspace["h"], plan.up.split
    up = w13.operand(x, hidden)
    target, h_place = h, POSITION
    if by_pair and (split > 1 or w2.gathers(size)):
        h_place = PAIR
    if split > 1 and isinstance(routing, Routing):
        width = size * (2 if activation.gated else 1)
        target = workspace["parts"][: routing.num_pairs * split * width].view(-1, width)
    whole = w13.gathers(hidden) or rounding is not None
    opened, load, a = _activations(x, w13, hidden, operand.load_padded if whole else operand.load_activations)
    grouped_product(
        TileFunctions(opened, load, *functions(w13, plan.up)),
        plan.up,
        a=a,
        b=up,
        out=Result(target, quantize=quantize),
        pairs=order,
        routing=routing,
        activation=activation,
        block_k=STEP,
        pdl=plan.pdl,
        a_rows=place.value,
        out_rows=PAIR.value if h_place is PAIR else None,
    )
    if split > 1 and isinstance(routing, Routing):
        combine_parts(
            parts=target,
            split=split,
            bias=up.bias,
            out=Result(h, quantize=quantize),
            routing=routing,
            activation=activation,
            columns=size,
            block=STEP,
            pdl=plan.pdl,
        )
    whole = size % STEP == 0
    if w2.gathers(size):
        h, whole = _gathered(h[:, :size], w2, routing, workspace, by_token=False, pdl=plan.pdl), True
    opened, load, a = _activations(h, w2, size, operand.load_padded if whole else operand.load_activations)
    y, split = out, plan.down.split
    if isinstance(routing, Routing):
        y = workspace["y"]
        if split > 1:
            y = workspace["parts"][: routing.num_pairs * split * hidden].view(-1, hidden)
    grouped_product(
        TileFunctions(opened, load, *functions(w2, plan.down)),
        plan.down,
        a=a,
        b=w2.operand(h, size),
        out=Result(y),
        pairs=order,
        routing=routing,
        activation=None,
        block_k=STEP,
        pdl=plan.pdl,
        a_rows=h_place.value,
    )
    if isinstance(routing, Routing):
        reduce_pairs(y, routing.ids, routing.num_experts, out, expert_map=routing.expert_map, split=split, pdl=plan.pdl)


def _rounded(x: Tensor, workspace: Mapping[str, Tensor], rounding: Rounding | None) -> QuantizeRows | None:
    """What rounds ``x`` beside the sort."""
    if rounding is None:
        return None
    return QuantizeRows(x, workspace["x_rounded"][: x.shape[0]], None, rounding.quantize, rounding.group)


def _activations(x: Tensor, matrix: MarlinMatrix, columns: int, load: object) -> tuple[Any, Any, tuple[Any, ...]]:
    """(open_a, load_a, A) of the tile kernel; ``load`` where no single columns are read."""
    if not matrix.indexes(columns):
        return operand.open_activations, load, (x, x.stride(0), matrix.columns)
    index, factors = matrix.index, matrix.column_factors
    if index is None:
        raise TypeError(f"the words have {matrix.columns} columns, the activations {columns}, and there is no index")
    stride = 0 if factors is None else factors.stride(0)
    a = (x, x.stride(0), matrix.columns, index, index.stride(0), factors, stride)
    return operand.open_indexed, operand.load_indexed, a


def _gathered(
    x: Tensor,
    matrix: MarlinMatrix,
    routing: Routing | Batch,
    workspace: Mapping[str, Tensor],
    *,
    by_token: bool,
    pdl: bool,
) -> Tensor:
    """``x`` as the columns of ``matrix`` want it, by pair."""
    room = workspace["gathered"]
    out = room[: routing.num_pairs].flatten()[: routing.num_pairs * _whole(matrix.columns)]
    out = out.view(routing.num_pairs, _whole(matrix.columns))
    index, factor = matrix.index, matrix.column_factors
    gather_columns(x, out, routing, by_token=by_token, index=index, factor=factor, pdl=pdl)
    return out
