"""A fused MoE layer with block FP8 weights, from plain tensors to plain tensors.

    sort      pairs by expert, and x quantised by rows and groups of block_k     (one launch, two for many pairs)
    up        h = act(x w13^T), quantised by rows and groups of block_k in the epilogue
    down      y[pair] = weight * (h w2^T)
    reduce    out[token] = sum over slots of y, in float32

The batched format has neither sort nor reduce: rows stay where they are, and are quantised beside the list of tiles.
With few tokens the k loops may be split among programs; a further launch then finishes h.  All scratch memory is the
caller's (`workspaces`), nothing is read before it is written, and there is no host synchronisation.

The intermediate is float32 until it is quantised; y has the dtype of the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from moe_core.gemm.hopper_launch import TILE, HopperResult, hopper_fits, hopper_product
from moe_core.gemm.launch import (
    Activation,
    Addition,
    Operand,
    Result,
    Routing,
    TileFunctions,
    combine_parts,
    grouped_product,
    is_aligned,
    weight_descriptor,
)
from moe_core.gemm.lora import Adapters
from moe_core.gemm.plan import TileConfig, TilePlan
from moe_core.gemm.rows_launch import quantize_rows
from moe_core.gemm.rule import tile_plan
from moe_core.gemm.spread import spread_rows
from moe_core.gemm.tile_kernel import PAIR, POSITION, TOKEN
from moe_core.lora import LoRA
from moe_core.ops.batch import Batch, BatchedRows, batch_rows
from moe_core.ops.reduce import reduce_pairs
from moe_core.ops.sort import QuantizeRows, SortedPairs, sort_pairs
from torch import Tensor

from moe_fp8.kernels import block

SILU = Activation("silu")
#: weight blocks of the specialised kernel
HOPPER_BLOCKS = ((128, 128), (64, 128), (128, 64), (64, 64))


def _functions(block_n: int, config: TileConfig, aligned: bool = False) -> TileFunctions:
    uniform = block_n % config.block_n == 0
    return TileFunctions(
        block.open_activations,
        block.load_activations,
        block.open_weights if uniform else block.open_weights_mixed,
        block.load_weights,
        block.multiply if uniform else block.multiply_mixed,
        prefetch_b=block.prefetch_weights if aligned else None,
    )


def _unspecialised(config: TileConfig, block_n: int) -> TileConfig:
    """For the tile kernel, what was chosen for the specialised one.

    Scales that differ among the columns of a tile leave no registers for 128 rows of gate and up.
    """
    if config.specialised and block_n < config.block_n:
        return replace(config, block_m=min(config.block_m, 64))
    return config


def _operand(weights: Tensor, scales: Tensor, bias: Tensor | None, rows: int, block_n: int) -> Operand:
    device = (weights, scales, weights.stride(0), weights.stride(1), scales.stride(0), scales.stride(1), block_n)
    return Operand(device, rows, weights.shape[2], bias, weight_descriptor(weights), is_aligned(weights))


def block_fp8_fused_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    w13_scale: Tensor,
    w2_scale: Tensor,
    out: Tensor,
    workspace: Mapping[str, Tensor],
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    expert_num_tokens: Tensor | None = None,
    plan: TilePlan | None = None,
    block_shape: tuple[int, int] = (128, 128),
    activation: Activation = SILU,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    lora: LoRA | None = None,
) -> None:
    """Write the layer's output to ``out`` [M, K]: sum over slots of weight * (w2 act(w13 x + b13) + b2).

    - ``x`` [M, K] bfloat16, float16 or float32, columns contiguous, any row stride; ``out`` [M, K] likewise
    - ``w13`` [E, 2N, K] (gate rows, then up rows; [E, N, K] without a gate), ``w2`` [E, K, N] e4m3, columns contiguous
    - ``w13_scale`` [E, 2 * ceil(N / block_n), ceil(K / block_k)] and ``w2_scale`` [E, ceil(K / block_n),
      ceil(N / block_k)] float32: gate and up each own their partial last row of blocks
    - ``topk_ids`` [M, k] int32 or int64, ``topk_weights`` [M, k] float32, both contiguous; an id that is negative, too
      large, or mapped by ``expert_map`` [E global] int32 to no local expert adds nothing
    - or, batched: ``expert_num_tokens`` [E] int32; ``x`` and ``out`` [E, T_max, K], rows beyond an expert's number are
      neither read nor written, results are not weighted, and the plan must not share loops
    - ``workspace``: the tensors of `moe_fp8.kernels.workspaces.block_fp8_workspaces`, by name, for at least M tokens
    - ``plan``: launch parameters; by default those of `moe_core.gemm.rule`
    - ``w13_bias`` [E, 2N] or [E, N], ``w2_bias`` [E, K], any float dtype
    - ``apply_router_weight_on_input``: weights multiply x instead of the expert's output
    - ``lora``: adapters, with the number of each token's (batched: row's); needs its workspaces too

    ``block_k`` and ``block_n`` are powers of two from 16 and 32 on.
    """
    experts, size, hidden = w13.shape[0], w2.shape[2], w2.shape[1]
    tokens = x.shape[-2]
    if tokens == 0:
        return
    block_n, block_k = block_shape
    routing: Routing | Batch
    if expert_num_tokens is not None:
        routing = Batch(expert_num_tokens, tokens)
        x, out = x.flatten(0, 1), out.flatten(0, 1)
    elif topk_ids is not None and topk_weights is not None:
        routing = Routing(topk_ids, topk_weights, experts, expert_map, apply_router_weight_on_input)
    else:
        raise TypeError("either topk_weights and topk_ids or expert_num_tokens are needed")
    up = _operand(w13, w13_scale, w13_bias, size, block_n)
    down = _operand(w2, w2_scale, w2_bias, hidden, block_n)
    if plan is None:
        layer_experts = experts if expert_map is None else expert_map.numel()
        major, minor = torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)
        capability = 10 * major + minor
        plan = tile_plan(
            tokens, routing.top_k, layer_experts, hidden, size, block_n=block_k, block_k=block_k, capability=capability
        )
    adapters = None
    if lora is not None:
        plan = _with_adapters(plan, block_n, apply_router_weight_on_input)
        adapters = Adapters(lora, routing, workspace)
    pdl = plan.pdl
    specialised = hopper_fits(plan.up, up) and block_shape in HOPPER_BLOCKS
    spread = specialised and 0 < routing.num_pairs <= workspace["sorted_values"].shape[0]
    x_values, x_scales = workspace["x_values"], workspace["x_scales"]
    rows = None if spread else QuantizeRows(x, x_values, x_scales, block.quantize, block_k)
    order: SortedPairs | BatchedRows
    if isinstance(routing, Batch):
        order = batch_rows(routing, plan.block_m, workspace=workspace, rows=rows, pdl=pdl)
    else:
        order = sort_pairs(
            routing.ids,
            experts,
            plan.block_m,
            workspace=workspace,
            expert_map=expert_map,
            rows=rows,
            positions=spread,
            pdl=pdl,
        )
    if spread and isinstance(order, SortedPairs) and isinstance(routing, Routing):
        x_values, x_scales = workspace["sorted_values"][: routing.num_pairs], workspace["sorted_scales"]
        spread_rows(QuantizeRows(x, x_values, x_scales, block.quantize, block_k), pairs=order, routing=routing, pdl=pdl)
    if specialised and (spread or isinstance(routing, Batch)):
        h_by_pair = False
        _specialised_up_product(x_values, x_scales, plan, up, order, routing, activation, block_shape, w13, workspace)
    else:
        added = None if adapters is None else adapters.addition("w13", x, by_pair=False)
        h_by_pair = _up_product(plan, up, order, routing, activation, block_shape, workspace, added)
    y = out if isinstance(routing, Batch) else workspace["y"]
    added = None if adapters is None else adapters.addition("w2", workspace["h"], by_pair=True)
    y = _down_product(plan, down, order, routing, w2, block_shape, workspace, h_by_pair, y, added)
    if isinstance(routing, Routing):
        reduce_pairs(y, routing.ids, experts, out, expert_map=expert_map, split=plan.down.split, pdl=pdl)


def _with_adapters(plan: TilePlan, block_n: int, on_input: bool) -> TilePlan:
    """The plan where adapters add to both products: their launches lie between, and the device's own kernel adds none.

    A split up product has weighted its parts before the addition comes.
    """
    up, down = (replace(_unspecialised(config, block_n), specialised=False) for config in (plan.up, plan.down))
    return TilePlan(replace(up, split=1) if on_input else up, down)


def _blocks(scales: Tensor, b: Operand, block_shape: tuple[int, int]) -> dict[str, Any]:
    """How `hopper_product` scales a step: its device function, and what that gets."""
    from moe_fp8.kernels.hopper_multiply import multiply_blocks, multiply_half_blocks

    _, weight_scales, _, _, stride_e, stride_n, _ = b.device
    block_n, block_k = block_shape
    return {
        "multiply": multiply_blocks if block_n == TILE else multiply_half_blocks,
        "depth": block_k,
        "scales": (scales, scales.stride(0)),
        "weight_scales": (weight_scales, stride_e, stride_n),
    }


def _specialised_up_product(
    values: Tensor,
    scales: Tensor,
    plan: TilePlan,
    up: Operand,
    order: SortedPairs | BatchedRows,
    routing: Routing | Batch,
    activation: Activation,
    block_shape: tuple[int, int],
    w13: Tensor,
    workspace: Mapping[str, Tensor],
) -> None:
    """h, rows in the order of ``values``, by the device's own kernel."""
    hopper_product(
        plan.up,
        **_blocks(scales, up, block_shape),
        values=values,
        weights=w13,
        b=up,
        out=HopperResult(
            workspace["h_values"], "groups" if block_shape[1] == TILE else "groups_64", workspace["h_scales"]
        ),
        pairs=order,
        routing=routing,
        activation=activation,
        pdl=plan.pdl,
    )


def _up_product(
    plan: TilePlan,
    up: Operand,
    order: SortedPairs | BatchedRows,
    routing: Routing | Batch,
    activation: Activation,
    block_shape: tuple[int, int],
    workspace: Mapping[str, Tensor],
    added: Addition | None = None,
) -> bool:
    """h = act(x w13^T), quantised into h_values and h_scales; True if their rows are pairs, False if sorted."""
    config, pdl, group = _unspecialised(plan.up, block_shape[0]), plan.pdl, block_shape[1]
    values, scales = workspace["x_values"], workspace["x_scales"]
    h = Result(workspace["h_values"], workspace["h_scales"], block.quantize)
    if added is not None:
        h = Result(workspace["h"])
    pairs = routing.num_pairs
    parts = None
    if config.split > 1 and isinstance(routing, Routing):
        width = up.rows * (2 if activation.gated else 1)
        parts = workspace["parts"][: pairs * config.split * width].view(-1, width)
    grouped_product(
        _functions(block_shape[0], config),
        config,
        a=(values, scales, values.stride(0), scales.stride(0)),
        b=up,
        out=h if parts is None else Result(parts),
        pairs=order,
        routing=routing,
        activation=activation,
        block_k=group,
        pdl=pdl,
        a_rows=TOKEN.value if isinstance(routing, Routing) else POSITION.value,
        # adapters have an order of their own
        out_rows=None if added is None else PAIR.value,
        added=added,
    )
    if parts is not None and isinstance(routing, Routing):
        combine_parts(
            parts=parts,
            split=config.split,
            bias=up.bias,
            out=h,
            routing=routing,
            activation=activation,
            columns=up.rows,
            block=group,
            pdl=pdl,
            added=added,
        )
    if added is not None:
        _quantize_h(workspace, pairs, group)
    return parts is not None or added is not None


def _quantize_h(workspace: Mapping[str, Tensor], pairs: int, group: int) -> None:
    """What an epilogue does where h is not needed in 16 bits: every group of every pair is a row here."""
    quantize_rows(
        workspace["h"][:pairs].view(-1, group),
        workspace["h_values"].view(-1, group),
        workspace["h_scales"],
        block.quantize,
        None,
        ("all", ()),
        pdl=False,
    )


def _down_product(
    plan: TilePlan,
    down: Operand,
    order: SortedPairs | BatchedRows,
    routing: Routing | Batch,
    w2: Tensor,
    block_shape: tuple[int, int],
    workspace: Mapping[str, Tensor],
    h_by_pair: bool,
    y: Tensor,
    added: Addition | None = None,
) -> Tensor:
    """y[pair] = weight * (h w2^T); what is returned has [pairs * split, K]."""
    config, pairs = plan.down, routing.num_pairs
    values, scales = workspace["h_values"], workspace["h_scales"]
    if not h_by_pair and hopper_fits(config, down) and block_shape in HOPPER_BLOCKS:
        hopper_product(
            config,
            **_blocks(scales, down, block_shape),
            values=values[:pairs],
            weights=w2,
            b=down,
            out=HopperResult(y),
            pairs=order,
            routing=routing,
            activation=None,
            pdl=plan.pdl,
        )
        return y
    config = _unspecialised(config, block_shape[0])
    if config.split > 1:
        y = workspace["parts"][: pairs * config.split * down.rows].view(-1, down.rows)
    grouped_product(
        _functions(block_shape[0], config, down.aligned and down.columns % 16 == 0),
        config,
        a=(values, scales, values.stride(0), scales.stride(0)),
        b=down,
        out=Result(y),
        pairs=order,
        routing=routing,
        activation=None,
        block_k=block_shape[1],
        pdl=plan.pdl,
        a_rows=(PAIR if h_by_pair else POSITION).value,
        added=added,
    )
    return y
