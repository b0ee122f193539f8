"""Launches of the W4A8 kernels that the compile session builds for every target."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from moe_core.activation import MoEActivation
from moe_core.device import DeviceInfo
from moe_core.gemm.plan import TilePlan
from moe_core.gemm.rule import quantizes_while_loading
from moe_core.jit.specimen import Specimen
from torch import Tensor

from moe_int8.kernels.w4a8_rule import w4a8_plan

#: experts, top-k, hidden size, intermediate size
_SHAPE = (128, 8, 2048, 768)
_TOKENS = (1, 300, 600, 2000, 40000)
#: tile coordinates outside the loop (two halves of 128 x 128; zero points of groups of 32 on sm_80)
_MAX_SPILLS = 64


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """Whole layers, for every plan that the rule chooses on the target, by group size."""
    if target.kind != "cuda" or target.capability < 80:
        return
    experts, top_k, hidden, size = _SHAPE
    raw = quantizes_while_loading(target.capability)
    for group in (-1, 128, 64, 32):
        plans: dict[TilePlan, int] = {}
        for tokens in _TOKENS:
            plan = w4a8_plan(tokens, top_k, experts, hidden, size, stepwise=group != -1, capability=target.capability)
            plans.setdefault(plan, tokens)
        name = f"w4a8 int8 {'channel' if group == -1 else group}"
        for number, (plan, tokens) in enumerate(plans.items()):
            run = partial(_layer, plan, tokens, group, raw=raw, gated=number != 1)
            yield Specimen(f"{name} {tokens}", run, _MAX_SPILLS)
        few = next(iter(plans))
        yield Specimen(f"{name} zero points", partial(_layer, few.unsplit(), 1, group, zero_points=True), _MAX_SPILLS)
        yield Specimen(f"{name} batched", partial(_layer, few.unsplit(), 8, group, raw=raw, batched=True), _MAX_SPILLS)


def _layer(
    plan: TilePlan,
    tokens: int,
    group: int,
    *,
    raw: bool = False,
    gated: bool = True,
    zero_points: bool = False,
    batched: bool = False,
) -> None:
    """One call on meta tensors."""
    from moe_core.gemm.launch import Activation
    from moe_core.gemm.rows_moe import ActivationScales, row_fused_moe
    from moe_core.gemm.workspaces import row_workspaces

    from moe_int8.kernels.nibbles import functions_of

    experts, top_k, hidden, size = _SHAPE

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def scale(rows: int, columns: int) -> Tensor:
        shape = (experts, rows, 1) if group == -1 else (experts, columns // group, rows)
        return meta(*shape, dtype=torch.float32)

    def sums(rows: int) -> tuple[Tensor, int] | tuple[()]:
        dtype = torch.int32 if group == -1 else torch.float32
        return (meta(experts, rows, dtype=dtype), rows) if zero_points else ()

    rows = (2 if gated else 1) * size
    activation = MoEActivation.SILU if gated else MoEActivation.RELU2_NO_MUL
    specs = row_workspaces(
        torch.int8,
        tokens,
        top_k,
        experts,
        hidden,
        size,
        torch.bfloat16,
        kind="token",
        batched=batched,
        scale=torch.int64 if zero_points else torch.float32,
    )
    shape = (experts, tokens, hidden) if batched else (tokens, hidden)
    row_fused_moe(
        functions_of(group, zero_points=zero_points),
        meta(*shape),
        meta(experts, rows, hidden // 2, dtype=torch.uint8),
        meta(experts, hidden, size // 2, dtype=torch.uint8),
        w13_scale=scale(rows, hidden),
        w2_scale=scale(hidden, size),
        activation_scales=ActivationScales("token"),
        out=meta(*shape),
        workspace={spec.name: meta(*spec.shape, dtype=spec.dtype) for spec in specs},
        plan=plan,
        activation=Activation(activation.value),
        topk_weights=None if batched else meta(tokens, top_k, dtype=torch.float32),
        topk_ids=None if batched else meta(tokens, top_k, dtype=torch.int32),
        expert_num_tokens=meta(experts, dtype=torch.int32) if batched else None,
        raw=raw,
        w13_extra=sums(rows),
        w2_extra=sums(hidden),
    )
