"""Launches of the FP8 kernels with row scales that the compile session builds for every target."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from moe_core.activation import MoEActivation
from moe_core.device import DeviceInfo
from moe_core.gemm.plan import TilePlan
from moe_core.gemm.rule import tile_plan
from moe_core.testing.compile import Specimen
from torch import Tensor

from moe_fp8.experts.triton_rows import quantizes_while_loading

#: name, experts, top-k, hidden size, intermediate size
_SHAPES = (
    ("deepseek-v3-tp8", 256, 8, 7168, 256),
    ("nemotron", 128, 6, 2688, 1856),
    ("odd", 6, 2, 1104, 1000),
)
_TOKENS = (1, 32, 600, 2000, 40000)
#: weight rows that are no multiple of 16 bytes cannot be copied asynchronously: their tiles pass through registers
_MAX_SPILLS_ODD = 256
#: tile coordinates and column indices outside the inner loops (specialised kernel)
_MAX_SPILLS = 128


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """Whole layers, for every plan that the rule chooses on the target for these shapes."""
    if target.kind != "cuda" or target.capability < 89:
        return
    raw = quantizes_while_loading(target.capability)
    for name, experts, top_k, hidden, size in _SHAPES:
        plans: dict[TilePlan, int] = {}
        for tokens in _TOKENS:
            plans.setdefault(tile_plan(tokens, top_k, experts, hidden, size, capability=target.capability), tokens)
        kinds = ("token", "tensor", "static")
        for number, (plan, tokens) in enumerate(plans.items()):
            kind = kinds[number % 3]
            run = partial(_layer, plan, tokens, experts, top_k, hidden, size, raw=raw)
            odd = name == "odd"
            yield Specimen(
                f"row fp8 {name} {tokens} {kind}",
                partial(run, kind=kind, channel=number % 2 == 0, bias=odd, mapped=odd, gated=name != "nemotron"),
                _MAX_SPILLS_ODD if odd else _MAX_SPILLS,
            )
    plan = tile_plan(8, 2, 6, 1104, 1008, capability=target.capability)
    for kind in ("token", "tensor", "static"):
        run = partial(_layer, tokens=8, experts=6, top_k=2, hidden=1104, size=1008, kind=kind, raw=raw)
        yield Specimen(f"row fp8 batched {kind}", partial(run, plan.unsplit(), batched=True))
        yield Specimen(f"row fp8 {kind}", partial(run, plan, on_input=True))


def _layer(
    plan: TilePlan,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    size: int,
    *,
    kind: str,
    channel: bool = True,
    gated: bool = True,
    bias: bool = False,
    mapped: bool = False,
    batched: bool = False,
    on_input: bool = False,
    raw: bool = True,
) -> None:
    """One call on meta tensors."""
    from moe_core.gemm.launch import Activation

    from moe_fp8.kernels.rows_moe import ActivationScales, row_fp8_fused_moe
    from moe_fp8.kernels.workspaces import row_fp8_workspaces

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def scale(rows: int, parts: int) -> Tensor:
        shape = (experts, rows, 1) if channel else (experts, parts)
        return meta(*shape, dtype=torch.float32)

    parts = 2 if gated else 1
    e4m3 = torch.float8_e4m3fn
    static = meta(experts, dtype=torch.float32) if kind == "static" else None
    activation = MoEActivation.SILU if gated else MoEActivation.RELU2_NO_MUL
    specs = row_fp8_workspaces(
        tokens,
        top_k,
        experts,
        hidden,
        size,
        torch.bfloat16,
        kind=kind,
        weight_on_input=on_input,
        batched=batched,
    )
    shape = (experts, tokens, hidden) if batched else (tokens, hidden)
    row_fp8_fused_moe(
        meta(*shape),
        meta(experts, parts * size, hidden, dtype=e4m3),
        meta(experts, hidden, size, dtype=e4m3),
        w13_scale=scale(parts * size, parts),
        w2_scale=scale(hidden, 1),
        activation_scales=ActivationScales(kind, static, static),
        out=meta(*shape),
        workspace={spec.name: meta(*spec.shape, dtype=spec.dtype) for spec in specs},
        plan=plan,
        activation=Activation(activation.value),
        topk_weights=None if batched else meta(tokens, 1 if on_input else top_k, dtype=torch.float32),
        topk_ids=None if batched else meta(tokens, 1 if on_input else top_k, dtype=torch.int32),
        expert_num_tokens=meta(experts, dtype=torch.int32) if batched else None,
        w13_bias=meta(experts, parts * size) if bias else None,
        w2_bias=meta(experts, hidden) if bias else None,
        expert_map=meta(2 * experts, dtype=torch.int32) if mapped else None,
        apply_router_weight_on_input=on_input,
        raw=raw,
    )
