"""Launches of the portable backend's kernels that the compile session builds for every target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from moe_core.activation import MoEActivation
from moe_core.device import DeviceInfo
from moe_core.gemm.plan import TilePlan
from moe_core.gemm.portable.kinds import ActivationKind
from moe_core.gemm.portable.rule import portable_plan
from moe_core.jit.specimen import Specimen
from torch import Tensor

#: experts, top-k, hidden size, intermediate size; the second's rows are no whole words
_SHAPE, _ODD = (128, 8, 2048, 768), (6, 2, 1101, 1003)
_TOKENS = (1, 300, 600, 2000, 40000)
#: tile coordinates outside the loop; sm_80 and sm_120: sums of 64 rows, gate and up, beside the numbers of a step
_MAX_SPILLS = 128
#: four products of a step, beside words of 8 bits or zero points
_MAX_SPILLS_FOUR = 256


@dataclass(frozen=True)
class _Kind:
    """One layer, and how it is called."""

    bits: int = 4
    group: int = 128
    permuted: bool = False
    zero_points: bool = False
    quantized: bool = False
    pre_scaled: bool = False
    batched: bool = False
    gated: bool = True
    dtype: torch.dtype = torch.bfloat16
    scale: torch.dtype = torch.bfloat16
    shape: tuple[int, int, int, int] = _SHAPE

    def plan(self, tokens: int, capability: int) -> TilePlan:
        experts, top_k, hidden, size = self.shape
        plan = portable_plan(
            tokens,
            top_k,
            experts,
            hidden,
            size,
            dtype_bytes=2 if self.quantized else self.dtype.itemsize,
            group_size=self.group,
            permuted=self.permuted,
            capability=capability,
        )
        return plan.unsplit() if self.batched else plan


#: what the numbers of a row become, by bits and by how scales lie: every plan
_SCALED = tuple(
    _Kind(bits, group, permuted)
    for bits in (4, 8)
    for group, permuted in ((-1, False), (128, False), (64, False), (32, False), (128, True))
)
#: one plan of few rows and one of many
_OTHERS = (
    _Kind(quantized=True),
    _Kind(group=-1, quantized=True),
    _Kind(group=32, quantized=True, dtype=torch.float16, pre_scaled=True),
    _Kind(dtype=torch.float16, scale=torch.float16),
    _Kind(8, -1, dtype=torch.float16, scale=torch.float16, zero_points=True),
    _Kind(group=32, dtype=torch.float32, scale=torch.float32, zero_points=True),
    _Kind(8, 32, dtype=torch.float32, scale=torch.float32),
    _Kind(8, 64, permuted=True, dtype=torch.float16, scale=torch.float32),
    _Kind(4, 64, permuted=True, dtype=torch.float32, scale=torch.float32),
    _Kind(8, pre_scaled=True, gated=False),
    _Kind(batched=True, zero_points=True),
    _Kind(batched=True, quantized=True, pre_scaled=True),
    _Kind(shape=_ODD, zero_points=True),
    _Kind(8, 32, shape=_ODD),
)


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """Whole layers, for the plans that the rule chooses on the target."""
    if not (target.kind == "hip" or target.capability >= 80):
        return
    for kind in _SCALED:
        plans: dict[TilePlan, int] = {}
        for tokens in _TOKENS:
            plans.setdefault(kind.plan(tokens, target.capability), tokens)
        for number, (plan, tokens) in enumerate(plans.items()):
            yield _specimen(replace(kind, zero_points=number % 2 == 1), plan, tokens)
    for kind in _OTHERS:
        for tokens in (1, 2000):
            yield _specimen(kind, kind.plan(tokens, target.capability), tokens)


def _specimen(kind: _Kind, plan: TilePlan, tokens: int) -> Specimen:
    name = f"wna16 {kind.bits} bits {'permuted' if kind.permuted else kind.group} {tokens}"
    parts = {
        "zero points": kind.zero_points,
        "e4m3": kind.quantized,
        "factors": kind.pre_scaled,
        "batched": kind.batched,
        "odd": kind.shape == _ODD,
        str(kind.dtype).removeprefix("torch."): kind.dtype is not torch.bfloat16,
    }
    four = kind.group == 32
    name = " ".join([name, *(part for part, on in parts.items() if on)])
    return Specimen(name, partial(_layer, kind, plan, tokens), _MAX_SPILLS_FOUR if four else _MAX_SPILLS)


def _layer(kind: _Kind, plan: TilePlan, tokens: int) -> None:
    """One call on meta tensors."""
    from moe_core.gemm.launch import Activation
    from moe_core.gemm.portable.layer import PackedMatrix, portable_fused_moe, portable_workspaces

    from moe_wna16.kernels.matrix import code_matrix

    experts, top_k, hidden, size = kind.shape

    def meta(*shape: int, dtype: torch.dtype = kind.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def matrix(rows: int, columns: int) -> PackedMatrix:
        codes = 32 // kind.bits
        words = -(-columns // codes)
        if columns % codes:
            words = -(-words // 4) * 4
        groups = 1 if kind.group == -1 else -(-columns // kind.group)
        zero = torch.uint8 if kind.bits == 4 else torch.int16
        return code_matrix(
            meta(experts, rows, words, dtype=torch.int32),
            kind.bits,
            columns,
            kind.group,
            meta(experts, groups, rows, dtype=kind.scale),
            meta(experts, groups, rows, dtype=zero) if kind.zero_points else None,
            meta(experts, -(-columns // 128) * 128, dtype=torch.int32) if kind.permuted else None,
            meta(experts, columns, dtype=torch.float32) if kind.pre_scaled else None,
            step=32 if kind.permuted or kind.dtype is torch.float32 else 128,
        )

    specs = portable_workspaces(
        tokens,
        top_k,
        experts,
        hidden,
        size,
        kind.dtype,
        kind=ActivationKind.TOKEN if kind.quantized else ActivationKind.PLAIN,
        pre_scaled=kind.pre_scaled,
        batched=kind.batched,
    )
    shape = (experts, tokens, hidden) if kind.batched else (tokens, hidden)
    activation = MoEActivation.SILU if kind.gated else MoEActivation.RELU2_NO_MUL
    portable_fused_moe(
        meta(*shape),
        matrix((2 if kind.gated else 1) * size, hidden),
        matrix(hidden, size),
        out=meta(*shape),
        workspace={spec.name: meta(*spec.shape, dtype=spec.dtype) for spec in specs},
        plan=plan,
        activation=Activation(activation.value),
        kind=ActivationKind.TOKEN if kind.quantized else ActivationKind.PLAIN,
        topk_weights=None if kind.batched else meta(tokens, top_k, dtype=torch.float32),
        topk_ids=None if kind.batched else meta(tokens, top_k, dtype=torch.int32),
        expert_num_tokens=meta(experts, dtype=torch.int32) if kind.batched else None,
    )
