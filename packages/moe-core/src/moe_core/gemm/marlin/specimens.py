"""Launches of the family that the compile session builds for every target: integer codes, and what prepares them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from moe_core.device import DeviceInfo
from moe_core.gemm.marlin.rule import marlin_plan, vector_plan
from moe_core.gemm.marlin.words import interleaved_rows, words_of
from moe_core.gemm.plan import TilePlan
from moe_core.jit.specimen import Specimen

if TYPE_CHECKING:
    from moe_core.gemm.marlin.layer import MarlinMatrix

#: experts, top-k, hidden size, intermediate size; the second's sizes are no multiples of anything
_SHAPE, _ODD = (256, 8, 7168, 2048), (6, 2, 1101, 1003)
#: where bytes with scales of groups, too, need no tiles for one token
_SMALL = (128, 8, 2048, 768)
#: every plan of the rule on sm_90, and on others
_TOKENS = (1, 64, 600, 1200, 2500, 4000, 8000, 20000)
#: tile coordinates outside the loop; 128 rows of activations leave none for them (most on sm100: 152)
_MAX_SPILLS = 192
#: single columns, and rows of no multiple of 16 bytes, pass through registers (most on sm90, Triton 3.9: 592)
_MAX_SPILLS_ODD = 640
#: four scales with zero points for every quad of words (most on sm90: 32)
_MAX_SPILLS_VECTORS = 64


@dataclass(frozen=True)
class _Kind:
    """One layer."""

    bits: int = 4
    group: int = 128
    zero_points: bool = False
    dtype: torch.dtype = torch.bfloat16
    gated: bool = True
    batched: bool = False
    gathered: bool = False
    indexed: bool = False
    shape: tuple[int, int, int, int] = _SHAPE

    @property
    def max_spills(self) -> int:
        return _MAX_SPILLS_ODD if self.shape == _ODD else _MAX_SPILLS

    def plan(self, tokens: int, capability: int) -> TilePlan:
        experts, top_k, hidden, size = self.shape
        split = not self.batched
        return marlin_plan(
            tokens,
            top_k,
            experts,
            hidden,
            size,
            bits=self.bits,
            dtype_bytes=self.dtype.itemsize,
            gated=self.gated,
            split=split,
            capability=capability,
        )


_EVERY_PLAN = (_Kind(), _Kind(bits=8, group=64, zero_points=True))
_ONE_PLAN = (
    _Kind(group=-1),
    _Kind(group=-1, zero_points=True),
    _Kind(group=64),
    _Kind(group=32, zero_points=True, dtype=torch.float16),
    _Kind(zero_points=True, gated=False),
    _Kind(bits=8, group=-1),
    _Kind(bits=8),
    _Kind(bits=8, group=32, dtype=torch.float16),
    _Kind(shape=_ODD, gathered=True),
    _Kind(shape=_ODD, group=32, indexed=True, dtype=torch.float16),
    _Kind(batched=True, gathered=True),
    _Kind(bits=8, group=-1, dtype=torch.float32),
    _Kind(group=64, zero_points=True, dtype=torch.float32),
)


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """The order of words and of scales, and whole layers of all kinds of scales."""
    if target.kind != "cuda" or target.capability < 80:
        return
    for bits, order in ((4, "integers"), (8, "integers"), (4, "e2m1"), (4, "e4m3")):
        for interleaved in (False, True):
            name = f"marlin words {bits} bits {order}{' interleaved' * interleaved}"
            yield Specimen(name, partial(_order, bits, order, interleaved))
    for dtype, zero_dtype in ((torch.bfloat16, None), (torch.float16, torch.uint8), (torch.float32, torch.int32)):
        yield Specimen(f"marlin scales {dtype} {zero_dtype}", partial(_scales, dtype, zero_dtype))
    for kind in _EVERY_PLAN:
        plans = {kind.plan(tokens, target.capability): tokens for tokens in _TOKENS}
        for plan, tokens in plans.items():
            yield Specimen(f"marlin {kind} {tokens}", partial(_layer, kind, plan, tokens), _MAX_SPILLS)
    for number, kind in enumerate(_ONE_PLAN):
        for tokens in (_TOKENS[number % 2], _TOKENS[-1]):
            plan = kind.plan(tokens, target.capability)
            yield Specimen(f"marlin {kind} {tokens}", partial(_layer, kind, plan, tokens), kind.max_spills)
    for kind in (*_EVERY_PLAN, *_ONE_PLAN):
        small = replace(kind, shape=_SMALL)
        if not (kind.batched or kind.gathered or kind.indexed or kind.dtype is torch.float32):
            for one in (kind, small) if kind.bits == 4 else (small,):
                yield Specimen(f"marlin vectors {one}", partial(_vectors, one, target.capability), _MAX_SPILLS_VECTORS)


def _order(bits: int, order: str, interleaved: bool) -> None:
    from moe_core.gemm.marlin.meta_call import meta
    from moe_core.gemm.marlin.words import order_words

    codes = meta(8, 4096, 2048 * bits // 8, dtype=torch.uint8)
    order_words(codes, 2048, bits, order=order, interleaved=interleaved, backend="triton")


def _scales(dtype: torch.dtype, zero_dtype: torch.dtype | None) -> None:
    from moe_core.gemm.marlin.meta_call import meta
    from moe_core.gemm.marlin.scales import order_scales

    zero = None if zero_dtype is None else meta(8, 4096, 16, dtype=zero_dtype)
    order_scales(meta(8, 4096, 16, dtype=dtype), zero, interleaved=zero is not None, backend="triton")


def _matrices(kind: _Kind) -> tuple[MarlinMatrix, MarlinMatrix]:
    from moe_core.gemm.marlin.layer import MarlinMatrix
    from moe_core.gemm.marlin.meta_call import meta

    experts, _, hidden, size = kind.shape

    def matrix(rows: int, outputs: int, columns: int, *, interleaved: bool) -> MarlinMatrix:
        wide = columns + 64 if kind.indexed else columns
        groups = 1 if kind.group == -1 else -(-wide // kind.group)
        rows = interleaved_rows(rows) if interleaved else rows
        index = None
        if kind.gathered or kind.indexed:
            index = meta(experts, wide, dtype=torch.int32)
        return MarlinMatrix(
            meta(experts, rows, words_of(wide, kind.bits), dtype=torch.int32),
            kind.bits,
            outputs,
            wide,
            kind.group,
            meta(experts, groups, rows, dtype=torch.int32 if kind.zero_points else torch.float32),
            factors=meta(experts, rows, dtype=torch.float32) if kind.dtype is torch.float16 else None,
            bias=meta(experts, outputs * (2 if interleaved else 1), dtype=kind.dtype) if kind.indexed else None,
            interleaved=interleaved,
            index=index,
            column_factors=meta(experts, columns, dtype=torch.float32) if kind.batched or kind.indexed else None,
        )

    up = matrix((2 if kind.gated else 1) * size, size, hidden, interleaved=kind.gated)
    return up, matrix(hidden, hidden, size, interleaved=False)


def _layer(kind: _Kind, plan: TilePlan, tokens: int) -> None:
    from moe_core.gemm.marlin.functions import integer_functions
    from moe_core.gemm.marlin.meta_call import call_layer

    _, top_k, hidden, size = kind.shape
    call_layer(
        integer_functions,
        *_matrices(kind),
        plan,
        tokens=tokens,
        top_k=top_k,
        dtype=kind.dtype,
        batched=kind.batched,
        gathered=(hidden, size) if kind.gathered else (0, 0),
    )


def _vectors(kind: _Kind, capability: int) -> None:
    from moe_core.gemm.marlin.functions import integer_vectors
    from moe_core.gemm.marlin.meta_call import call_vectors

    experts, top_k, hidden, size = kind.shape
    plan = vector_plan(1, top_k, experts, hidden, size, bits=kind.bits, gated=kind.gated, capability=capability)
    w13, w2 = _matrices(kind)
    functions = integer_vectors(w13)
    if plan is not None and functions is not None:
        call_vectors(functions, w13, w2, plan, top_k=top_k, dtype=kind.dtype)
