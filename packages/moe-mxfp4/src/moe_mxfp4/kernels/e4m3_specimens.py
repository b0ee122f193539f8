"""Launches with e2m1 weights and e4m3 activations that the compile session builds for every target."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from moe_core.device import DeviceInfo
from moe_core.gemm.marlin.words import words_of
from moe_core.gemm.plan import TilePlan
from moe_core.gemm.rows_specimens import row_layer
from moe_core.gemm.rule import quantizes_while_loading
from moe_core.jit.specimen import Specimen
from torch import Tensor

from moe_mxfp4.kernels.e4m3_rule import e4m3_plan

if TYPE_CHECKING:
    from moe_core.gemm.rows_moe import RowFunctions

#: experts, top-k, hidden size, intermediate size; the second are no whole steps and tiles
_SHAPES = {"gpt-oss": (128, 4, 2880, 2880), "odd": (6, 2, 1104, 1000)}
_TOKENS = (1, 32, 600, 2000, 20000)
#: tile coordinates outside the loop: two sums of 128 x 128 in eight warps
_MAX_SPILLS = 128


def _functions() -> RowFunctions:
    from moe_mxfp4.kernels.e4m3 import E2M1

    return E2M1


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """Whole layers, for every plan that the rule chooses on the target."""
    if target.kind != "cuda" or target.capability < 89:
        return
    raw = quantizes_while_loading(target.capability)
    for name, (experts, top_k, hidden, size) in _SHAPES.items():
        plans: dict[TilePlan, int] = {}
        for tokens in _TOKENS:
            plans.setdefault(e4m3_plan(tokens, top_k, experts, hidden, size, capability=target.capability), tokens)
        run = partial(
            row_layer,
            _functions,
            experts=experts,
            top_k=top_k,
            hidden=hidden,
            size=size,
            weights=partial(_words, experts),
            extra=partial(_powers, experts),
            raw=raw,
        )
        for number, (plan, tokens) in enumerate(plans.items()):
            kind = ("token", "static")[number % 2]
            specimen = partial(run, plan=plan, tokens=tokens, kind=kind, bias=True, gated=name != "odd" or number != 1)
            yield Specimen(f"mxfp4 fp8 {name} {tokens} {kind}", specimen, _MAX_SPILLS)
        few = next(iter(plans)).unsplit()
        batched = partial(run, plan=few, tokens=8, kind="token", batched=True)
        yield Specimen(f"mxfp4 fp8 {name} batched", batched, _MAX_SPILLS)


def _words(experts: int, rows: int, columns: int) -> Tensor:
    return torch.empty(experts, rows, words_of(columns, 4), dtype=torch.int32, device="meta")


def _powers(experts: int, rows: int) -> tuple[Any, ...]:
    powers = torch.empty(experts, 23, rows, dtype=torch.int32, device="meta")
    return powers, powers.stride(0), powers.stride(1)
