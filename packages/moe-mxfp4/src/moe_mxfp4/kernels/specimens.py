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

from moe_mxfp4.scales import has_scaled_units

#: experts, top-k, hidden size, intermediate size; the second's rows are no whole words
_SHAPE, _ODD = (128, 4, 2880, 2880), (6, 2, 1101, 1003)
_TOKENS = (1, 300, 600, 1300, 2000, 40000)
#: tile coordinates outside the loop; sm_80 to sm_89 and sm_120: sums of 32 rows, gate and up, of two products each
_MAX_SPILLS = 192
#: masks of weight rows beside them; float32 products, which no tensor core computes
_MAX_SPILLS_MORE = 320


@dataclass(frozen=True)
class _Kind:
    """One layer, and how it is called."""

    activations: ActivationKind = ActivationKind.PLAIN
    batched: bool = False
    gated: bool = True
    weight_on_input: bool = False
    scaled: bool = False
    dtype: torch.dtype = torch.bfloat16
    shape: tuple[int, int, int, int] = _SHAPE

    @property
    def name(self) -> str:
        parts = {
            self.activations.name.lower(): self.activations is not ActivationKind.PLAIN,
            "batched": self.batched,
            "no gate": not self.gated,
            "on input": self.weight_on_input,
            "scaled": self.scaled,
            "odd": self.shape == _ODD,
            str(self.dtype).removeprefix("torch."): self.dtype is not torch.bfloat16,
        }
        return " ".join(["mxfp4", *(part for part, on in parts.items() if on)])

    @property
    def is_wide(self) -> bool:
        return self.dtype is torch.float32 and self.activations is ActivationKind.PLAIN

    def plan(self, tokens: int, capability: int) -> TilePlan:
        experts, top_k, hidden, size = self.shape
        plan = portable_plan(
            tokens,
            top_k,
            experts,
            hidden,
            size,
            dtype_bytes=4 if self.is_wide else 2,
            group_size=-1,
            scaled_numbers=True,
            scaled_steps=self.activations is ActivationKind.BLOCK,
            capability=capability,
        )
        return plan.unsplit() if self.batched else plan


#: every plan
_PLANNED = tuple(map(_Kind, (ActivationKind.PLAIN, ActivationKind.BLOCK, ActivationKind.MXFP8)))
#: one plan of few rows and one of many
_OTHERS = (
    _Kind(ActivationKind.TOKEN),
    _Kind(ActivationKind.EXPERT),
    _Kind(ActivationKind.MXFP4),
    _Kind(ActivationKind.MXFP4_EVEN),
    _Kind(ActivationKind.MXFP4_DOWN, gated=False),
    _Kind(ActivationKind.MXFP8_EVEN, gated=False),
    _Kind(ActivationKind.MXFP8_DOWN),
    _Kind(dtype=torch.float16, gated=False),
    _Kind(dtype=torch.float32),
    _Kind(ActivationKind.BLOCK, dtype=torch.float32, gated=False),
    _Kind(ActivationKind.MXFP4, dtype=torch.float16, batched=True),
    _Kind(ActivationKind.EXPERT, batched=True, shape=_ODD),
    _Kind(ActivationKind.MXFP8, weight_on_input=True, shape=_ODD),
    _Kind(batched=True, shape=_ODD),
)


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """Whole layers, for the plans that the rule chooses on the target."""
    if not (target.kind == "hip" or target.capability >= 80):
        return
    units = has_scaled_units(target)
    planned, others = (
        [replace(kind, scaled=units and kind.activations is ActivationKind.MXFP8) for kind in kinds]
        for kinds in (_PLANNED, _OTHERS)
    )
    for kind in planned:
        plans: dict[TilePlan, int] = {}
        for tokens in _TOKENS:
            plans.setdefault(kind.plan(tokens, target.capability), tokens)
        for plan, tokens in plans.items():
            yield _specimen(kind, plan, tokens)
    for kind in others:
        for tokens in (1, 2000):
            yield _specimen(kind, kind.plan(tokens, target.capability), tokens)


def _specimen(kind: _Kind, plan: TilePlan, tokens: int) -> Specimen:
    spills = _MAX_SPILLS_MORE if kind.shape == _ODD or kind.is_wide else _MAX_SPILLS
    return Specimen(f"{kind.name} {tokens}", partial(_layer, kind, plan, tokens), spills)


def _layer(kind: _Kind, plan: TilePlan, tokens: int) -> None:
    """One call on meta tensors."""
    from moe_core.gemm.launch import Activation
    from moe_core.gemm.portable.layer import STEP, PackedMatrix, portable_fused_moe, portable_workspaces

    from moe_mxfp4.kernels.matrix import SHORT_STEP, e2m1_matrix, scaled_matrix

    experts, top_k, hidden, size = kind.shape
    if kind.weight_on_input:
        top_k = 1

    def meta(*shape: int, dtype: torch.dtype = kind.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def matrix(rows: int, columns: int) -> PackedMatrix:
        if kind.scaled:
            return scaled_matrix(
                meta(experts, rows, -(-columns // 2), dtype=torch.uint8),
                columns,
                meta(experts, rows, -(-columns // 128) * 4, dtype=torch.uint8),
                meta(experts, rows, dtype=torch.float32),
                bias=meta(experts, rows),
            )
        words = -(-columns // 8)
        if columns % 8:
            words = -(-words // 4) * 4
        return e2m1_matrix(
            meta(experts, rows, words, dtype=torch.int32),
            columns,
            meta(experts, -(-columns // 128), rows, dtype=torch.int32),
            meta(experts, rows, dtype=torch.float32),
            bias=meta(experts, rows),
            input_scale=meta(experts, dtype=torch.float32),
            step=SHORT_STEP if kind.is_wide else STEP,
        )

    specs = portable_workspaces(
        tokens,
        top_k,
        experts,
        hidden,
        size,
        kind.dtype,
        kind=kind.activations,
        weight_on_input=kind.weight_on_input,
        scaled=kind.scaled,
        batched=kind.batched,
    )
    shape = (experts, tokens, hidden) if kind.batched else (tokens, hidden)
    activation = Activation(MoEActivation.SWIGLUOAI.value, 1.702, 1.0, 7.0)
    if not kind.gated:
        activation = Activation(MoEActivation.RELU2_NO_MUL.value)
    portable_fused_moe(
        meta(*shape),
        matrix((2 if kind.gated else 1) * size, hidden),
        matrix(hidden, size),
        out=meta(*shape),
        workspace={spec.name: meta(*spec.shape, dtype=spec.dtype) for spec in specs},
        plan=plan,
        activation=activation,
        kind=kind.activations,
        topk_weights=None if kind.batched else meta(tokens, top_k, dtype=torch.float32),
        topk_ids=None if kind.batched else meta(tokens, top_k, dtype=torch.int32),
        expert_num_tokens=meta(experts, dtype=torch.int32) if kind.batched else None,
        apply_router_weight_on_input=kind.weight_on_input,
    )
