"""Launches of the kernels that widen int8 weights, which the compile session builds for every target."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from moe_core.activation import MoEActivation
from moe_core.device import DeviceInfo
from moe_core.gemm.plan import TilePlan
from moe_core.jit.specimen import Specimen
from torch import Tensor

from moe_int8.kernels.wide_rule import wide_plan

#: name, experts, top-k, hidden size, intermediate size
_SHAPES = (("deepseek-v3-tp8", 256, 8, 7168, 256), ("qwen3-30b-a3b", 128, 8, 2048, 768), ("odd", 6, 2, 1104, 1000))
_TOKENS = (1, 600, 1000, 2000, 40000)
#: tile coordinates outside the loop (two halves of 128 x 128, rows of a batch on sm_80)
_MAX_SPILLS = 64
#: weight rows that are no multiple of 16 bytes cannot be copied asynchronously: their tiles pass through registers
_MAX_SPILLS_ODD = 256
#: float32 products have no tensor cores, and Triton holds both operands of a step in registers
_MAX_SPILLS_FLOAT32 = 8192


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """Whole layers, for every plan that the rule chooses on the target for these shapes."""
    if target.kind != "cuda" or target.capability < 80:
        return
    dtypes = (torch.bfloat16, torch.float16)
    for name, experts, top_k, hidden, size in _SHAPES:
        plans: dict[TilePlan, int] = {}
        for tokens in _TOKENS:
            plans.setdefault(wide_plan(tokens, top_k, experts, hidden, size, capability=target.capability), tokens)
        for number, (plan, tokens) in enumerate(plans.items()):
            odd, dtype = name == "odd", dtypes[number % 2]
            yield Specimen(
                f"wide int8 {name} {tokens} {dtype}",
                partial(_layer, plan, tokens, experts, top_k, hidden, size, dtype=dtype, bias=odd, gated=number != 2),
                _MAX_SPILLS_ODD if odd else _MAX_SPILLS,
            )
    plan = wide_plan(8, 2, 6, 1104, 1008, dtype_bytes=4, capability=target.capability)
    yield Specimen(
        "wide int8 float32", partial(_layer, plan, 8, 6, 2, 1104, 1008, dtype=torch.float32), _MAX_SPILLS_FLOAT32
    )
    plan = wide_plan(8, 2, 6, 1104, 1008, capability=target.capability).unsplit()
    yield Specimen("wide int8 batched", partial(_layer, plan, 8, 6, 2, 1104, 1008, batched=True), _MAX_SPILLS)


def _layer(
    plan: TilePlan,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    gated: bool = True,
    bias: bool = False,
    batched: bool = False,
) -> None:
    """One call on meta tensors."""
    from moe_core.gemm.launch import Activation

    from moe_int8.kernels.wide_moe import wide_fused_moe, wide_workspaces

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = (2 if gated else 1) * size
    activation = MoEActivation.SILU if gated else MoEActivation.RELU2_NO_MUL
    specs = wide_workspaces(tokens, top_k, experts, hidden, size, dtype, batched=batched)
    shape = (experts, tokens, hidden) if batched else (tokens, hidden)
    wide_fused_moe(
        meta(*shape),
        meta(experts, rows, -(-hidden // 32) * 8, dtype=torch.int32),
        meta(experts, hidden, -(-size // 32) * 8, dtype=torch.int32),
        w13_scale=meta(experts, rows, 1, dtype=torch.float32),
        w2_scale=meta(experts, hidden, 1, dtype=torch.float32),
        out=meta(*shape),
        workspace={spec.name: meta(*spec.shape, dtype=spec.dtype) for spec in specs},
        plan=plan,
        activation=Activation(activation.value),
        topk_weights=None if batched else meta(tokens, top_k, dtype=torch.float32),
        topk_ids=None if batched else meta(tokens, top_k, dtype=torch.int32),
        expert_num_tokens=meta(experts, dtype=torch.int32) if batched else None,
        w13_bias=meta(experts, rows) if bias else None,
        w2_bias=meta(experts, hidden) if bias else None,
    )
