"""Weights of 8 bits (or packed in fewer) beside 8-bit rows, with scales that do not change along k."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_core.gemm.fused.scaled_mm import ScaledMMFunctions
from moe_core.gemm.launch import (
    GemmWeight,
    OperandA,
    TileFunctions,
    WarpSpecialisedGemm,
    is_aligned,
    weight_descriptor,
    weight_strides,
)
from moe_core.gemm.plan import TileConfig
from moe_core.gemm.scaled_mm import open_values


def scaled_mm_weight(
    functions: ScaledMMFunctions,
    weights: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    rows: int,
    columns: int,
    *,
    extra: tuple[Any, ...] = (),
) -> GemmWeight:
    """Weights [E, rows of all halves, K] with scales [E, rows, 1] or [E, halves]; ``rows`` of one half.

    Row-major, or block-major as `weight_strides` has them.
    ``functions.packed`` of the ``columns`` K lie in an element of ``weights``.
    ``extra`` goes behind what `rows.open_weights` takes, for functions of a scheme's own.
    """
    half, row = (rows * scales.stride(1), scales.stride(1)) if scales.dim() == 3 else (scales.stride(1), 0)
    strides = (scales.stride(0), half, row, *extra)

    def tile_functions(config: TileConfig, a: OperandA) -> TileFunctions:
        return TileFunctions(
            open_values,
            functions.load_unquantized if a.form == "unquantized" else functions.load_values,
            functions.open_weights,
            functions.load_weights,
            functions.multiply,
            functions.scale_acc,
            functions.prefetch_weights,
            functions.accumulate,
        )

    warp_specialised = None
    if functions.packed == 1:
        warp_specialised = WarpSpecialisedGemm(weights, _warp_specialised, (scales, *strides))
    return GemmWeight(
        (weights, scales, *weight_strides(weights, functions.block_k // functions.packed), *strides),
        rows,
        columns,
        tile_functions,
        functions.block_k,
        bias,
        weight_descriptor(weights, functions.packed),
        is_aligned(weights),
        warp_specialised=warp_specialised,
    )


def _warp_specialised() -> Any:
    from moe_core.gemm.hopper_scaled_mm import scaled_mm

    return scaled_mm
