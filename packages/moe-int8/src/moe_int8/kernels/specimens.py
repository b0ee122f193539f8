"""Launches of the INT8 kernels that the compile session builds for every target."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from moe_core.device import DeviceInfo
from moe_core.gemm.rows_specimens import row_layer, row_specimens
from moe_core.gemm.rule import tile_plan
from moe_core.jit.specimen import Specimen

if TYPE_CHECKING:
    from moe_core.gemm.rows_moe import RowFunctions

_EXPERTS, _HIDDEN, _SIZE = 6, 1104, 1008
#: tile coordinates and column indices outside the inner loops (specialised kernel, Triton 3.9)
_MAX_SPILLS = 192


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """Whole layers, for every plan that the rule chooses on the target; with zero points for few rows and many."""
    if target.kind != "hip" and target.capability < 80:
        return
    yield from row_specimens(target, "int8", _functions, per_tensor=False)
    for tokens in (8, 2000):
        plan = tile_plan(tokens, 2, _EXPERTS, _HIDDEN, _SIZE, capability=target.capability).unsplit()
        for kind in ("token", "static"):
            run = partial(
                row_layer,
                _functions_zero,
                plan,
                tokens,
                _EXPERTS,
                2,
                _HIDDEN,
                _SIZE,
                kind=kind,
                scale_dtype=torch.int64,
                extra=_sums,
            )
            yield Specimen(f"row int8 zero points {tokens} {kind}", run, _MAX_SPILLS)
            yield Specimen(f"row int8 zero points batched {tokens} {kind}", partial(run, batched=True), _MAX_SPILLS)


def _functions() -> RowFunctions:
    from moe_int8.kernels.rows import INT8

    return INT8


def _functions_zero() -> RowFunctions:
    from moe_int8.kernels.rows import INT8_ZERO

    return INT8_ZERO


def _sums(rows: int) -> tuple[Any, ...]:
    return torch.empty(_EXPERTS, rows, dtype=torch.int32, device="meta"), rows
