"""Launches of `moe_core.gemm.marlin` with e4m3 weights that the compile session builds for every target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from moe_core.device import DeviceInfo
from moe_core.gemm.marlin.rule import marlin_plan, vector_plan
from moe_core.gemm.plan import TilePlan
from moe_core.jit.specimen import Specimen

if TYPE_CHECKING:
    from moe_core.gemm.marlin.layer import MarlinMatrix

#: experts, top-k, hidden size, intermediate size; the second are no whole steps and tiles
_SHAPE, _ODD = (128, 8, 2048, 1536), (6, 2, 1104, 1000)
_TOKENS = (1, 8, 128, 300, 600, 2000, 20000)
#: tile coordinates outside the loop: sums of 128 x 128 in four warps
_MAX_SPILLS = 128
#: masks of weight rows beside them
_MAX_SPILLS_ODD = 512


@dataclass(frozen=True)
class _Kind:
    """One layer, and how it is called; ``group``: -1 per row, 128 or 64 per block, 32 MXFP8, ``rounded`` for x too."""

    group: int = -1
    batched: bool = False
    gated: bool = True
    dtype: torch.dtype = torch.bfloat16
    shape: tuple[int, int, int, int] = _SHAPE
    rounded: bool = False

    @property
    def name(self) -> str:
        name = {-1: "rows", 128: "blocks", 64: "narrow blocks", 32: "mxfp8"}[self.group]
        parts = {
            "batched": self.batched,
            "no gate": not self.gated,
            "odd": self.shape == _ODD,
            "float16": self.dtype is torch.float16,
            "float32": self.dtype is torch.float32,
            "activations": self.rounded,
        }
        return " ".join([f"marlin fp8 {name}", *(part for part, on in parts.items() if on)])

    def plan(self, tokens: int, capability: int) -> TilePlan:
        experts, top_k, hidden, size = self.shape
        split = not self.batched
        plan = marlin_plan(
            tokens,
            top_k,
            experts,
            hidden,
            size,
            bits=8,
            dtype_bytes=2 if self.rounded else self.dtype.itemsize,
            gated=self.gated,
            split=split,
            capability=capability,
        )
        return plan.unsplit() if self.batched else plan


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """Whole layers: every plan that the rule chooses on the target, and one of few and of many rows for the rest."""
    if target.kind != "cuda" or target.capability < 80:
        return
    for kind in (_Kind(group, shape=shape) for shape in (_SHAPE, _ODD) for group in (-1, 128, 64, 32)):
        seen: set[TilePlan] = set()
        for tokens in _TOKENS:
            plan = kind.plan(tokens, target.capability)
            if plan not in seen:
                seen.add(plan)
                yield _specimen(kind, plan, tokens)
    for kind in (_Kind(group, dtype=torch.float16) for group in (-1, 128, 64, 32)):
        for one, tokens in ((kind, 8), (kind, 2000), (replace(kind, batched=True), 8), (replace(kind, gated=False), 8)):
            yield _specimen(one, one.plan(tokens, target.capability), tokens)
    for kind in (_Kind(group, dtype=torch.float32) for group in (-1, 128, 64, 32)):
        yield _specimen(kind, kind.plan(8, target.capability), 8)
    for kind in (_Kind(32, rounded=True, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)):
        for one, tokens in ((kind, 8), (kind, 2000), (replace(kind, batched=True), 8), (replace(kind, shape=_ODD), 8)):
            yield _specimen(one, one.plan(tokens, target.capability), tokens)
    for kind in (_Kind(), _Kind(shape=_ODD), _Kind(dtype=torch.float16), _Kind(gated=False)):
        yield Specimen(f"{kind.name} vectors", partial(_vectors, kind, target.capability))


def _specimen(kind: _Kind, plan: TilePlan, tokens: int) -> Specimen:
    spills = _MAX_SPILLS_ODD if kind.shape == _ODD else _MAX_SPILLS
    return Specimen(f"{kind.name} {tokens}", partial(_layer, kind, plan, tokens), spills)


def _matrices(kind: _Kind) -> tuple[MarlinMatrix, MarlinMatrix]:
    from moe_core.gemm.marlin.layer import MarlinMatrix
    from moe_core.gemm.marlin.meta_call import meta
    from moe_core.gemm.marlin.words import interleaved_rows, words_of

    experts, _, hidden, size = kind.shape

    def matrix(outputs: int, columns: int, *, interleaved: bool) -> MarlinMatrix:
        rows = interleaved_rows(2 * outputs) if interleaved else outputs
        scales = (-(-rows // 128), 2 * (-(-columns // 128) * 128 // kind.group))
        if kind.group in (-1, 32):
            scales = (1 if kind.group == -1 else -(-columns // 128), rows)
        return MarlinMatrix(
            meta(experts, rows, words_of(columns, 8), dtype=torch.int32),
            8,
            outputs,
            columns,
            kind.group,
            meta(experts, *scales, dtype=torch.int32 if kind.group == 32 else torch.float32),
            None if kind.group == -1 else meta(experts, rows, dtype=torch.float32),
            interleaved=interleaved,
        )

    return matrix(size, hidden, interleaved=kind.gated), matrix(hidden, size, interleaved=False)


def _layer(kind: _Kind, plan: TilePlan, tokens: int) -> None:
    from moe_core.gemm.marlin.meta_call import call_layer

    from moe_fp8.kernels.marlin_e4m3 import e4m3_functions, mxfp8_rounding

    call_layer(
        e4m3_functions,
        *_matrices(kind),
        plan,
        tokens=tokens,
        top_k=kind.shape[1],
        dtype=kind.dtype,
        batched=kind.batched,
        rounding=mxfp8_rounding() if kind.rounded else None,
    )


def _vectors(kind: _Kind, capability: int) -> None:
    from moe_core.gemm.marlin.meta_call import call_vectors

    from moe_fp8.kernels.marlin_e4m3 import e4m3_vectors

    experts, top_k, hidden, size = kind.shape
    plan = vector_plan(1, top_k, experts, hidden, size, bits=8, gated=kind.gated, capability=capability)
    w13, w2 = _matrices(kind)
    functions = e4m3_vectors(w13)
    if plan is not None and functions is not None:
        call_vectors(functions, w13, w2, plan, top_k=top_k, dtype=kind.dtype)
