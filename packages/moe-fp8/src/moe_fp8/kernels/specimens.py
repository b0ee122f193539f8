"""Launches of the FP8 kernels that the compile session builds for every target."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from moe_core.activation import MoEActivation
from moe_core.device import DeviceInfo
from moe_core.gemm.plan import TilePlan
from moe_core.gemm.rows_specimens import adapters_for
from moe_core.gemm.rule import tile_plan
from moe_core.jit.specimen import Specimen
from torch import Tensor

#: name, experts, top-k, hidden size, intermediate size; the last one is no multiple of anything
_SHAPES = (
    ("mixtral-8x7b", 8, 2, 4096, 14336),
    ("deepseek-v3-tp8", 256, 8, 7168, 256),
    ("qwen3-30b-a3b", 128, 8, 2048, 768),
    ("odd", 6, 2, 1104, 1000),
)
_TOKENS = (1, 8, 300, 2000, 40000)
#: tile coordinates outside the inner loops (specialised kernel), and a 64-row tile on sm_100
_MAX_SPILLS = 96
#: two scales for the rows of a tile, one for its columns, on sm_100 (408 there, none on sm_90)
_MAX_SPILLS_WIDE = 448
#: weight rows that are no multiple of 16 bytes cannot be copied asynchronously: their tiles pass through registers
_MAX_SPILLS_ODD = 256


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """Whole layers, for every plan that the rule chooses on the target for these shapes."""
    if target.kind != "hip" and target.capability < 89:
        return
    for name, experts, top_k, hidden, size in _SHAPES:
        plans: dict[TilePlan, int] = {}
        for tokens in _TOKENS:
            plan = tile_plan(tokens, top_k, experts, hidden, size, capability=target.capability)
            plans.setdefault(plan, tokens)
        for plan, tokens in plans.items():
            run = partial(_layer, plan, tokens, experts, top_k, hidden, size)
            if name != "odd":
                yield Specimen(f"block fp8 {name} {tokens}", run, _MAX_SPILLS)
                continue
            yield Specimen(f"block fp8 {name} {tokens}", run, _MAX_SPILLS_ODD)
            yield Specimen(f"block fp8 {name} {tokens} biased", partial(run, bias=True, mapped=True), _MAX_SPILLS_ODD)
    plan = tile_plan(8, 2, 6, 1104, 1000, capability=target.capability)
    for activation in MoEActivation:
        run = partial(_layer, plan, 8, 6, 2, 1104, 1008, activation=activation)
        yield Specimen(f"block fp8 {activation.value}", run, _MAX_SPILLS)
    for tokens in (8, 2000):
        plan = tile_plan(tokens, 2, 6, 1104, 1008, capability=target.capability).unsplit()
        run = partial(_layer, plan, tokens, 6, 2, 1104, 1008, batched=True)
        yield Specimen(f"block fp8 batched {tokens}", run, _MAX_SPILLS)
        run = partial(_layer, plan, tokens, 6, 2, 1104, 1008, adapted=True)
        yield Specimen(f"block fp8 {tokens} adapters", run, _MAX_SPILLS)
    for block in ((64, 64), (128, 64), (64, 128)):
        spills = _MAX_SPILLS_WIDE if block == (64, 128) else _MAX_SPILLS
        for tokens in (8, 300, 2000):
            plan = tile_plan(tokens, 2, 6, 1104, 1008, block_n=block[1], block_k=block[1], capability=target.capability)
            run = partial(_layer, plan.unsplit(), tokens, 6, 2, 1104, 1008, block=block)
            name = f"block fp8 {block[0]}x{block[1]} {tokens}"
            yield Specimen(name, run, spills)
        yield Specimen(f"{name} batched", partial(run, batched=True), spills)
        yield Specimen(f"{name} adapters", partial(run, adapted=True), spills)


def _layer(
    plan: TilePlan,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    size: int,
    *,
    activation: MoEActivation = MoEActivation.SILU,
    block: tuple[int, int] = (128, 128),
    bias: bool = False,
    mapped: bool = False,
    batched: bool = False,
    adapted: bool = False,
) -> None:
    """One call on meta tensors."""
    from moe_core.gemm.launch import Activation

    from moe_fp8.kernels.block_moe import block_fp8_fused_moe
    from moe_fp8.kernels.workspaces import block_fp8_workspaces

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def scale(rows: int, columns: int, parts: int) -> Tensor:
        return meta(experts, parts * -(-rows // block[0]), -(-columns // block[1]), dtype=torch.float32)

    parts = 2 if activation.is_gated else 1
    params = activation.resolve_params(None)
    e4m3 = torch.float8_e4m3fn
    rows = (experts, tokens) if batched else (tokens,)
    lora = adapters_for(experts, top_k, hidden, size, activation, rows) if adapted else None
    specs = block_fp8_workspaces(
        tokens,
        top_k,
        experts,
        hidden,
        size,
        torch.bfloat16,
        block,
        batched,
        None if lora is None else lora[0],
    )
    shape = (experts, tokens, hidden) if batched else (tokens, hidden)
    block_fp8_fused_moe(
        meta(*shape),
        meta(experts, parts * size, hidden, dtype=e4m3),
        meta(experts, hidden, size, dtype=e4m3),
        w13_scale=scale(size, hidden, parts),
        w2_scale=scale(hidden, size, 1),
        topk_weights=None if batched else meta(tokens, top_k, dtype=torch.float32),
        topk_ids=None if batched else meta(tokens, top_k, dtype=torch.int32),
        expert_num_tokens=meta(experts, dtype=torch.int32) if batched else None,
        out=meta(*shape),
        workspace={spec.name: meta(*spec.shape, dtype=spec.dtype) for spec in specs},
        plan=plan,
        block_shape=block,
        activation=Activation(activation.value, params.alpha or 1.0, params.beta or 0.0, params.limit),
        w13_bias=meta(experts, parts * size) if bias else None,
        w2_bias=meta(experts, hidden) if bias else None,
        expert_map=meta(2 * experts, dtype=torch.int32) if mapped else None,
        lora=None if lora is None else lora[1],
    )
