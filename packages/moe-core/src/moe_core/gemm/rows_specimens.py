"""Launches of `moe_core.gemm.rows_moe` that schemes have compiled for every target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_core.activation import MoEActivation
from moe_core.config import FusedMoEConfig
from moe_core.device import DeviceInfo
from moe_core.gemm.plan import TilePlan
from moe_core.gemm.rule import quantizes_while_loading, tile_plan
from moe_core.jit.specimen import Specimen
from moe_core.lora import LoRA, LoRAWeights

if TYPE_CHECKING:
    from moe_core.gemm.launch import Activation
    from moe_core.gemm.rows_moe import RowFunctions

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


def row_specimens(
    target: DeviceInfo, name_of: str, functions_of: Callable[[], RowFunctions], *, per_tensor: bool = True
) -> Iterator[Specimen]:
    """Whole layers, for every plan that the rule chooses on the target for these shapes.

    ``name_of`` the element type, ``functions_of`` gives its functions; ``per_tensor``: weights with one scale too.
    """
    raw = quantizes_while_loading(target.capability)
    for name, experts, top_k, hidden, size in _SHAPES:
        plans: dict[TilePlan, int] = {}
        for tokens in _TOKENS:
            plans.setdefault(tile_plan(tokens, top_k, experts, hidden, size, capability=target.capability), tokens)
        kinds = ("token", "tensor", "static")
        for number, (plan, tokens) in enumerate(plans.items()):
            kind = kinds[number % 3]
            run = partial(row_layer, functions_of, plan, tokens, experts, top_k, hidden, size, raw=raw)
            odd, channel = name == "odd", number % 2 == 0 or not per_tensor
            yield Specimen(
                f"row {name_of} {name} {tokens} {kind}",
                partial(run, kind=kind, channel=channel, bias=odd, mapped=odd, gated=name != "nemotron"),
                _MAX_SPILLS_ODD if odd else _MAX_SPILLS,
            )
    plan = tile_plan(8, 2, 6, 1104, 1008, capability=target.capability)
    for kind in ("token", "tensor", "static"):
        run = partial(row_layer, functions_of, tokens=8, experts=6, top_k=2, hidden=1104, size=1008, kind=kind, raw=raw)
        yield Specimen(f"row {name_of} batched {kind}", partial(run, plan=plan.unsplit(), batched=True))
        yield Specimen(f"row {name_of} {kind}", partial(run, plan=plan, on_input=True))
        yield Specimen(f"row {name_of} {kind} adapters", partial(run, plan=plan, adapted=True), _MAX_SPILLS)


def adapters_for(
    experts: int, top_k: int, hidden: int, size: int, activation: MoEActivation, rows: tuple[int, ...]
) -> tuple[FusedMoEConfig, LoRA]:
    """A layer with adapters, and those of its call on meta tensors; ``rows``: shape of their numbers."""
    config = FusedMoEConfig(
        experts, top_k, hidden, size, activation=activation, is_lora_enabled=True, max_loras=4, max_lora_rank=16
    )
    numbers = torch.empty(rows, dtype=torch.int32, device="meta")
    return config, LoRA(LoRAWeights.zeros(config, "meta"), numbers)


def row_layer(
    functions_of: Callable[[], RowFunctions],
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
    scale_dtype: torch.dtype = torch.float32,
    extra: Callable[[int], tuple[Any, ...]] = lambda rows: (),
    weights: Callable[[int, int], Tensor] | None = None,
    activation: Activation | None = None,
    adapted: bool = False,
) -> None:
    """One call on meta tensors.

    ``weights`` (rows, columns) where they are not bytes of the functions' dtype; ``extra``: of weights with so many
    rows, see `row_fused_moe`; ``activation`` where it is neither silu nor relu2_no_mul; ``adapted``: by LoRA.
    """
    from moe_core.gemm.launch import Activation
    from moe_core.gemm.rows_moe import ActivationScales, row_fused_moe
    from moe_core.gemm.workspaces import row_workspaces

    functions = functions_of()

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def scale(rows: int, parts: int) -> Tensor:
        shape = (experts, rows, 1) if channel else (experts, parts)
        return meta(*shape, dtype=torch.float32)

    parts = 2 if gated else 1
    static = meta(experts, dtype=scale_dtype) if kind == "static" else None
    kind_of = MoEActivation.SILU if gated else MoEActivation.RELU2_NO_MUL
    rows = (experts, tokens) if batched else (tokens,)
    lora = adapters_for(experts, top_k, hidden, size, kind_of, rows) if adapted else None
    if weights is None:

        def weights(rows: int, columns: int) -> Tensor:
            return meta(experts, rows, columns, dtype=functions.dtype)

    specs = row_workspaces(
        functions.dtype,
        tokens,
        top_k,
        experts,
        hidden,
        size,
        torch.bfloat16,
        kind=kind,
        weight_on_input=on_input,
        batched=batched,
        scale=scale_dtype,
        lora=None if lora is None else lora[0],
    )
    shape = (experts, tokens, hidden) if batched else (tokens, hidden)
    row_fused_moe(
        functions,
        meta(*shape),
        weights(parts * size, hidden),
        weights(hidden, size),
        w13_scale=scale(parts * size, parts),
        w2_scale=scale(hidden, 1),
        activation_scales=ActivationScales(kind, static, static),
        out=meta(*shape),
        workspace={spec.name: meta(*spec.shape, dtype=spec.dtype) for spec in specs},
        plan=plan,
        activation=activation or Activation(kind_of.value),
        topk_weights=None if batched else meta(tokens, 1 if on_input else top_k, dtype=torch.float32),
        topk_ids=None if batched else meta(tokens, 1 if on_input else top_k, dtype=torch.int32),
        expert_num_tokens=meta(experts, dtype=torch.int32) if batched else None,
        w13_bias=meta(experts, parts * size) if bias else None,
        w2_bias=meta(experts, hidden) if bias else None,
        expert_map=meta(2 * experts, dtype=torch.int32) if mapped else None,
        apply_router_weight_on_input=on_input,
        raw=raw,
        w13_extra=extra(parts * size),
        w2_extra=extra(hidden),
        lora=None if lora is None else lora[1],
    )
