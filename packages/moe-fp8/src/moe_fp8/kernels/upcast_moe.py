"""A fused MoE layer whose e4m3 weights are widened in registers, from plain tensors to plain tensors.

    sort      pairs by expert; x in the order of `upcast.arrange`, rounded to MXFP8 where activations are quantised
    up        h = act(x w13^T), in that order too
    down      y[pair] = weight * (h w2^T)
    reduce    out[token] = sum over slots of y, in float32

In the batched format rows arrive grouped, and the down product writes the output.  With few tokens the k loops may be
split among programs; a further launch then finishes h.  All scratch memory is the caller's (`upcast_workspaces`),
nothing is read before it is written, and there is no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
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
from moe_core.gemm.plan import TileConfig, TilePlan
from moe_core.gemm.tile_kernel import PAIR, POSITION
from moe_core.ops.batch import Batch, BatchedRows, batch_rows
from moe_core.ops.reduce import reduce_pairs
from moe_core.ops.sort import QuantizeRows, SortedPairs, sort_pairs
from torch import Tensor

from moe_fp8.kernels import upcast
from moe_fp8.kernels.upcast_rule import BLOCK_N, is_apart, is_stepwise
from moe_fp8.kernels.upcast_workspaces import HALVES

#: by the dtype of stored activations (`stored_dtype`)
_ARRANGE = {
    torch.bfloat16: upcast.arrange_bfloat16,
    torch.float16: upcast.arrange_float16,
    torch.float32: upcast.arrange_float32,
    HALVES: upcast.arrange_halves,
}


class WeightScale(Enum):
    """Which weights share a scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    BLOCK = "block"
    MXFP8 = "mxfp8"


@dataclass(frozen=True, eq=False)
class UpcastWeights:
    """e4m3 weights of one layer.

    - ``w13`` [E, 2N, K16] (gate rows, then up rows; [E, N, K16] without a gate), ``w2`` [E, K, N16] e4m3; K16 and N16
      are K and N rounded up to a multiple of 16; every row starts at a multiple of 16 bytes
    - ``w13_scale``, ``w2_scale``: float32 [E, parts] (TENSOR; parts 2 with a gate, else 1; w2: 1), [E, rows, 1]
      (CHANNEL), [E, parts * ceil(rows / block_n), ceil(columns / block_k)] (BLOCK: gate and up each own their partial
      last row of blocks); uint8 e8m0 [E, ceil(columns / 128), rows, 4] (MXFP8; each half's rows padded to a multiple
      of 4), the byte of group g of a row at [g // 4, row, g % 4]
    - ``block_shape`` of BLOCK: (block_n, block_k), powers of two, block_k 64 or a multiple of 128
    - ``w13_bias`` [E, 2N] or [E, N], ``w2_bias`` [E, K], any float dtype
    """

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor
    w2_scale: Tensor
    kind: WeightScale
    block_shape: tuple[int, int] = (128, 128)
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None

    @property
    def block_k(self) -> int:
        """Depth of a step: what one scale of a row spans, or 128."""
        return self.block_shape[1] if self.kind is WeightScale.BLOCK else 128

    def operand(self, weights: Tensor, scales: Tensor, bias: Tensor | None, rows: int) -> Operand:
        """What the kernel gets of one of the two matrices; ``rows`` of one half."""
        words = weights.view(torch.int32)
        if self.kind is WeightScale.MXFP8:
            scales = scales.view(torch.int32).flatten(2)
        make = weight_descriptor(words)

        def descriptor(block_rows: int, block_columns: int) -> Any:
            return make(block_rows, block_columns // 4)

        strides = (words.stride(0), words.stride(1), scales.stride(0), scales.stride(1))
        device = (words, scales, *strides, self.block_shape[0])
        return Operand(device, rows, weights.shape[2], bias, None if make is None else descriptor)

    def functions(self, config: TileConfig, stored: torch.dtype) -> TileFunctions:
        """The device functions for a tile, and activations that are stored so."""
        load = upcast.load_activations
        if stored is HALVES:
            load = upcast.load_halves
        elif is_apart(config):
            load = upcast.load_activations_apart
        a = (upcast.open_activations, load)
        if self.kind is WeightScale.TENSOR:
            b = (upcast.open_tensor, upcast.load_unscaled, upcast.multiply, upcast.finish_tensor)
        elif self.kind is WeightScale.CHANNEL:
            b = (upcast.open_channel, upcast.load_unscaled, upcast.multiply, upcast.finish_channel)
        elif self.kind is WeightScale.MXFP8:
            multiply = upcast.multiply_mxfp8_stepwise if is_stepwise(config) else upcast.multiply_mxfp8
            if stored is HALVES:
                multiply = upcast.multiply_mxfp8_halves
            b = (upcast.open_mxfp8, upcast.load_mxfp8, multiply, None)
        elif self.block_shape[0] % config.block_n == 0:
            b = (upcast.open_block, upcast.load_block, upcast.multiply_block, None)
        else:
            b = (upcast.open_block_mixed, upcast.load_block, upcast.multiply_block_mixed, None)
        return TileFunctions(*a, *b)


def upcast_fused_moe(
    x: Tensor,
    weights: UpcastWeights,
    *,
    topk_weights: Tensor,
    topk_ids: Tensor,
    out: Tensor,
    workspace: Mapping[str, Tensor],
    plan: TilePlan,
    activation: Activation,
    mxfp8_activations: bool = False,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> None:
    """Write the layer's output to ``out`` [M, K]: sum over slots of weight * (w2 act(w13 x + b13) + b2).

    - ``x`` [M, K] bfloat16, float16 or float32, columns contiguous, any row stride; ``out`` [M, K] likewise
    - ``topk_ids`` [M, k] int32 or int64, ``topk_weights`` [M, k] float32, both contiguous; an id that is negative, too
      large, or mapped by ``expert_map`` [E global] int32 to no local expert adds nothing
    - ``workspace``: the tensors of `upcast_workspaces`, by name, for at least M tokens
    - ``mxfp8_activations``: x and h are rounded to MXFP8 (1 x 32, e8m0), and the products computed in bfloat16, which
      holds such values exactly; otherwise both have the dtype of ``x``, float16 beside MXFP8 weights in halves
    - ``apply_router_weight_on_input`` (k = 1): weights multiply x (without ``mxfp8_activations`` the first product
      before its bias) instead of the result
    """
    tokens, hidden = x.shape
    if tokens == 0:
        return
    experts, size = weights.w13.shape[0], weights.w13.shape[1] // (2 if activation.gated else 1)
    if mxfp8_activations and apply_router_weight_on_input:
        # scales are powers of two: x has to be weighted before it is rounded, not its product
        x = torch.mul(x, topk_weights, out=workspace["x_weighted"][:tokens])
        topk_weights = workspace["unit_weights"][:tokens].fill_(1.0)
    routing = Routing(topk_ids, topk_weights, experts, expert_map, apply_router_weight_on_input)
    rows = _rows(x, workspace, mxfp8_activations)
    order = sort_pairs(
        topk_ids, experts, plan.block_m, workspace=workspace, expert_map=expert_map, rows=rows, pdl=plan.pdl
    )
    by_pair = _up_product(rows, weights, size, plan, order, routing, activation, workspace)
    config, pairs = plan.down, topk_ids.numel()
    y = workspace["y"]
    if config.split > 1:
        y = workspace["parts"][: pairs * config.split * hidden].view(-1, hidden)
    _down_product(weights, hidden, config, order, routing, workspace, y, by_pair=by_pair, pdl=plan.pdl)
    reduce_pairs(y, topk_ids, experts, out, expert_map=expert_map, split=config.split, pdl=plan.pdl)


def upcast_batched_moe(
    x: Tensor,
    weights: UpcastWeights,
    *,
    counts: Tensor,
    out: Tensor,
    workspace: Mapping[str, Tensor],
    plan: TilePlan,
    activation: Activation,
    mxfp8_activations: bool = False,
) -> None:
    """The same for rows that arrive by expert: ``x`` and ``out`` [E, T_max, K] contiguous, unweighted.

    ``counts`` [E] int32 rows in use of each expert; other rows are neither read nor written.  ``plan`` without split
    loops, ``workspace`` of `upcast_batched_workspaces`.
    """
    experts, capacity, hidden = x.shape
    if capacity == 0:
        return
    size = weights.w13.shape[1] // (2 if activation.gated else 1)
    batch = Batch(counts, capacity)
    rows = _rows(x.view(-1, hidden), workspace, mxfp8_activations)
    order = batch_rows(batch, plan.block_m, workspace=workspace, rows=rows, pdl=plan.pdl)
    _up_product(rows, weights, size, plan, order, batch, activation, workspace)
    y = out.view(-1, hidden)
    _down_product(weights, hidden, plan.down, order, batch, workspace, y, by_pair=False, pdl=plan.pdl)


def _rows(x: Tensor, workspace: Mapping[str, Tensor], mxfp8: bool) -> QuantizeRows:
    values = workspace["x_values"]
    arrange = upcast.arrange_mxfp8 if mxfp8 else _ARRANGE[values.dtype]
    return QuantizeRows(x, values, None, arrange, upcast.UNIT.value)


def _operand(values: Tensor) -> tuple[Any, ...]:
    """The tuple A of the kernel."""
    numbers = values.view(torch.bfloat16) if values.dtype is HALVES else values
    return numbers, numbers.stride(0)


def _up_product(
    rows: QuantizeRows,
    weights: UpcastWeights,
    size: int,
    plan: TilePlan,
    order: SortedPairs | BatchedRows,
    routing: Routing | Batch,
    activation: Activation,
    workspace: Mapping[str, Tensor],
) -> bool:
    """h = act(x w13^T) into h_values; True if its rows are pairs, False if sorted."""
    config, x = plan.up, workspace["x_values"]
    up = weights.operand(weights.w13, weights.w13_scale, weights.w13_bias, size)
    h = Result(workspace["h_values"], None, rows.quantize)
    parts = None
    if config.split > 1 and isinstance(routing, Routing):
        width = size * (2 if activation.gated else 1)
        parts = workspace["parts"][: routing.ids.numel() * config.split * width].view(-1, width)
    grouped_product(
        weights.functions(config, x.dtype),
        config,
        a=_operand(x),
        b=up,
        out=h if parts is None else Result(parts),
        pairs=order,
        routing=routing,
        activation=activation,
        block_k=weights.block_k,
        pdl=plan.pdl,
    )
    if parts is None or not isinstance(routing, Routing):
        return False
    combine_parts(
        parts=parts,
        split=config.split,
        bias=up.bias,
        out=h,
        routing=routing,
        activation=activation,
        columns=size,
        block=BLOCK_N,
        pdl=plan.pdl,
    )
    return True


def _down_product(
    weights: UpcastWeights,
    hidden: int,
    config: TileConfig,
    order: SortedPairs | BatchedRows,
    routing: Routing | Batch,
    workspace: Mapping[str, Tensor],
    y: Tensor,
    *,
    by_pair: bool,
    pdl: bool,
) -> None:
    """y[pair] = weight * (h w2^T)."""
    h = workspace["h_values"]
    grouped_product(
        weights.functions(config, h.dtype),
        config,
        a=_operand(h),
        b=weights.operand(weights.w2, weights.w2_scale, weights.w2_bias, hidden),
        out=Result(y),
        pairs=order,
        routing=routing,
        activation=None,
        block_k=weights.block_k,
        pdl=pdl,
        a_rows=(PAIR if by_pair else POSITION).value,
    )
