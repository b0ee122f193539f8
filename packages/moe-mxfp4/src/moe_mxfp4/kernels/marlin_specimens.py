"""Launches of `moe_core.gemm.marlin` with e2m1 weights that the compile session builds for every target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from moe_core.device import DeviceInfo
from moe_core.gemm.plan import TilePlan
from moe_core.jit.specimen import Specimen

from moe_mxfp4.kernels.marlin_rule import e2m1_plan

#: experts, top-k, hidden size, intermediate size; the second are no whole steps and tiles
_SHAPE, _ODD = (128, 4, 2880, 2880), (6, 2, 1104, 1000)
_TOKENS = (1, 32, 600, 1000, 2000, 4096, 20000)
#: tile coordinates outside the loop: sums of 128 x 128 in four warps (most on sm_100: 144)
_MAX_SPILLS = 160
#: masks of weight rows beside them
_MAX_SPILLS_ODD = 512


@dataclass(frozen=True)
class _Kind:
    """One layer, and how it is called."""

    batched: bool = False
    gated: bool = True
    dtype: torch.dtype = torch.bfloat16
    shape: tuple[int, int, int, int] = _SHAPE

    @property
    def name(self) -> str:
        parts = {
            "batched": self.batched,
            "no gate": not self.gated,
            "odd": self.shape == _ODD,
            "float16": self.dtype is torch.float16,
        }
        return " ".join(["marlin mxfp4", *(part for part, on in parts.items() if on)])

    def plan(self, tokens: int, capability: int) -> TilePlan:
        experts, top_k, hidden, size = self.shape
        split = not self.batched
        return e2m1_plan(tokens, top_k, experts, hidden, size, gated=self.gated, split=split, capability=capability)


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """Whole layers: every plan that the rule chooses on the target, and one of few and of many rows for the rest."""
    if target.kind != "cuda" or target.capability < 80:
        return
    for kind in (_Kind(), _Kind(shape=_ODD)):
        seen: set[TilePlan] = set()
        for tokens in _TOKENS:
            plan = kind.plan(tokens, target.capability)
            if plan not in seen:
                seen.add(plan)
                yield _specimen(kind, plan, tokens)
    half = _Kind(dtype=torch.float16)
    for kind, tokens in ((half, 8), (half, 4096), (replace(half, batched=True), 8), (_Kind(gated=False), 8)):
        yield _specimen(kind, kind.plan(tokens, target.capability), tokens)


def _specimen(kind: _Kind, plan: TilePlan, tokens: int) -> Specimen:
    spills = _MAX_SPILLS_ODD if kind.shape == _ODD else _MAX_SPILLS
    return Specimen(f"{kind.name} {tokens}", partial(_layer, kind, plan, tokens), spills)


def _layer(kind: _Kind, plan: TilePlan, tokens: int) -> None:
    from moe_core.gemm.launch import Activation
    from moe_core.gemm.marlin.layer import MarlinMatrix
    from moe_core.gemm.marlin.meta_call import call_layer, meta
    from moe_core.gemm.marlin.words import interleaved_rows, words_of

    from moe_mxfp4.groups import GROUP
    from moe_mxfp4.kernels.marlin_e2m1 import e2m1_functions

    experts, top_k, hidden, size = kind.shape

    def matrix(outputs: int, columns: int, *, interleaved: bool) -> MarlinMatrix:
        rows = interleaved_rows(2 * outputs) if interleaved else outputs
        return MarlinMatrix(
            meta(experts, rows, words_of(columns, 4), dtype=torch.int32),
            4,
            outputs,
            columns,
            GROUP,
            meta(experts, -(-columns // 128), rows, dtype=torch.int32),
            meta(experts, rows, dtype=torch.float32),
            bias=meta(experts, 2 * outputs if interleaved else outputs, dtype=torch.bfloat16),
            interleaved=interleaved,
        )

    call_layer(
        e2m1_functions,
        matrix(size, hidden, interleaved=kind.gated),
        matrix(hidden, size, interleaved=False),
        plan,
        tokens=tokens,
        top_k=top_k,
        dtype=kind.dtype,
        batched=kind.batched,
        activation=Activation("swigluoai", 1.702, 1.0, 7.0) if kind.gated else None,
    )
