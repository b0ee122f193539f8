"""Launches of the FP8 kernels with row scales that the compile session builds for every target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moe_core.device import DeviceInfo
from moe_core.gemm.rows_specimens import row_specimens
from moe_core.jit.specimen import Specimen

if TYPE_CHECKING:
    from moe_core.gemm.rows_moe import RowFunctions


def _functions() -> RowFunctions:
    from moe_core.gemm.rows_e4m3 import E4M3

    return E4M3


def specimens(target: DeviceInfo) -> Iterator[Specimen]:
    """Whole layers, for every plan that the rule chooses on the target."""
    if target.kind == "hip" or target.capability >= 89:
        yield from row_specimens(target, "fp8", _functions)
