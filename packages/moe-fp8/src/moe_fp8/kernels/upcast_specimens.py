"""Launches with weights widened in registers that the compile session builds for every target."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from moe_core.activation import MoEActivation
from moe_core.device import DeviceInfo
from moe_core.gemm.plan import TilePlan
from moe_core.jit.specimen import Specimen
from torch import Tensor

from moe_fp8.kernels.upcast_rule import upcast_plan

#: name, experts, top-k, hidden size, intermediate size
_SHAPES = (
    ("mixtral-8x7b", 8, 2, 4096, 14336),
    ("deepseek-v3-tp8", 256, 8, 7168, 256),
    ("odd", 6, 2, 1104, 1000),
)
_TOKENS = (1, 30, 600, 20000)
#: addresses outside the inner loops (sm_80 to sm_89; sm_90: 128 rows of both halves, the most with Triton 3.9)
_MAX_SPILLS = 96
#: blocks of fewer rows than a tile: a scale per row of the tile and step beside the sums
_MAX_SPILLS_NARROW_BLOCKS = 160
#: weight rows with masks in both directions keep them in registers too
_MAX_SPILLS_ODD = 448
#: float32 products have no tensor cores, and Triton holds both operands of a step in registers
_MAX_SPILLS_FLOAT32 = 8192
#: float16 beside MXFP8 weights: the weights of a step enter twice as many products
_MAX_SPILLS_HALVES = 128


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """Whole layers, for every plan that the rule chooses on the target for these shapes."""
    if target.kind != "cuda" or target.capability < 80:
        return
    kinds = ["channel", "tensor", "block", "mxfp8"] + ["mxfp8 activations"] * (target.capability >= 89)
    for name, experts, top_k, hidden, size in _SHAPES:
        seen: set[tuple[str, TilePlan]] = set()
        for kind, tokens in product(kinds if name == "mixtral-8x7b" else kinds[2:], _TOKENS):
            stepwise = kind == "block"
            plan = upcast_plan(tokens, top_k, experts, hidden, size, stepwise=stepwise, capability=target.capability)
            if (kind, plan) not in seen:
                seen.add((kind, plan))
                odd = name == "odd"
                run = partial(_layer, plan, tokens, experts, top_k, hidden, size, kind=kind, bias=odd)
                spills = _MAX_SPILLS_ODD if odd else _MAX_SPILLS
                yield Specimen(f"upcast fp8 {name} {tokens} {kind}", run, spills)
    plan = upcast_plan(8, 2, 6, 1104, 1008, capability=target.capability, split=False)
    for dtype, kind, tokens in (
        (torch.float16, "channel", 8),
        (torch.float16, "mxfp8", 8),
        (torch.float16, "mxfp8", 60),
        (torch.float16, "mxfp8", 6000),
        (torch.float32, "channel", 8),
        (torch.float32, "mxfp8", 8),
    ):
        wide, halves = dtype is torch.float32, dtype is torch.float16 and kind == "mxfp8"
        narrow = upcast_plan(
            tokens, 2, 6, 1104, 1008, capability=target.capability, split=False, wide=wide, halves=halves
        )
        run = partial(_layer, narrow, tokens, 6, 2, 1104, 1008, kind=kind, dtype=dtype)
        spills = _MAX_SPILLS_FLOAT32 if wide else _MAX_SPILLS_HALVES if halves else _MAX_SPILLS
        yield Specimen(f"upcast fp8 {tokens} {kind} {dtype}", run, spills)
    # the block scheme compiles every activation; they are the same functions
    for activation in (MoEActivation.SWIGLUOAI, MoEActivation.RELU2_NO_MUL):
        few = upcast_plan(8, 2, 6, 1104, 1008, gated=activation.is_gated, capability=target.capability)
        run = partial(_layer, few, 8, 6, 2, 1104, 1008, kind="channel", activation=activation)
        yield Specimen(f"upcast fp8 {activation.value}", run, _MAX_SPILLS)
    for block in ((64, 64), (128, 64), (64, 128)):
        narrow = upcast_plan(8, 2, 6, 1104, 1008, block_k=block[1], stepwise=True, capability=target.capability)
        run = partial(_layer, narrow, 8, 6, 2, 1104, 1008, kind="block", block=block)
        yield Specimen(f"upcast fp8 {block[0]}x{block[1]}", run, _MAX_SPILLS_NARROW_BLOCKS)
    for kind in kinds[3:]:
        run = partial(_layer, plan, 8, 6, 2, 1104, 1008, kind=kind, batched=True)
        yield Specimen(f"upcast fp8 batched {kind}", run, _MAX_SPILLS)


def _layer(
    plan: TilePlan,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    size: int,
    *,
    kind: str,
    activation: MoEActivation = MoEActivation.SILU,
    block: tuple[int, int] = (128, 128),
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    batched: bool = False,
) -> None:
    """One call on meta tensors."""
    from moe_core.gemm.launch import Activation

    from moe_fp8.kernels.upcast_moe import UpcastWeights, WeightScale, upcast_batched_moe, upcast_fused_moe
    from moe_fp8.kernels.upcast_workspaces import stored_dtype, upcast_batched_workspaces, upcast_workspaces

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    scaling = WeightScale(kind.removesuffix(" activations"))
    mxfp8_activations = kind.endswith(" activations")
    parts = 2 if activation.is_gated else 1

    def scale(rows: int, columns: int, halves: int) -> Tensor:
        if scaling is WeightScale.TENSOR:
            return meta(experts, halves, dtype=torch.float32)
        if scaling is WeightScale.CHANNEL:
            return meta(experts, halves * rows, 1, dtype=torch.float32)
        if scaling is WeightScale.MXFP8:
            return meta(experts, -(-columns // 128), halves * rows, 4, dtype=torch.uint8)
        return meta(experts, halves * -(-rows // block[0]), -(-columns // block[1]), dtype=torch.float32)

    def padded(columns: int) -> int:
        return -(-columns // 16) * 16

    weights = UpcastWeights(
        meta(experts, parts * size, padded(hidden), dtype=torch.float8_e4m3fn),
        meta(experts, hidden, padded(size), dtype=torch.float8_e4m3fn),
        scale(size, hidden, parts),
        scale(hidden, size, 1),
        scaling,
        block,
        meta(experts, parts * size) if bias else None,
        meta(experts, hidden) if bias else None,
    )
    stored = stored_dtype(dtype, mxfp8_weights=scaling is WeightScale.MXFP8, mxfp8_activations=mxfp8_activations)
    params = activation.resolve_params(None)
    between = Activation(activation.value, params.alpha or 1.0, params.beta or 0.0, params.limit)
    if batched:
        specs = upcast_batched_workspaces(tokens, experts, hidden, size, dtype=stored)
        upcast_batched_moe(
            meta(experts, tokens, hidden),
            weights,
            counts=meta(experts, dtype=torch.int32),
            out=meta(experts, tokens, hidden),
            workspace={spec.name: meta(*spec.shape, dtype=spec.dtype) for spec in specs},
            plan=plan,
            activation=between,
            mxfp8_activations=mxfp8_activations,
        )
        return
    specs = upcast_workspaces(tokens, top_k, experts, hidden, size, dtype=stored, output_dtype=dtype)
    upcast_fused_moe(
        meta(tokens, hidden),
        weights,
        topk_weights=meta(tokens, top_k, dtype=torch.float32),
        topk_ids=meta(tokens, top_k, dtype=torch.int32),
        out=meta(tokens, hidden),
        workspace={spec.name: meta(*spec.shape, dtype=spec.dtype) for spec in specs},
        plan=plan,
        activation=between,
        mxfp8_activations=mxfp8_activations,
    )
