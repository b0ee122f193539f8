"""Which device functions a matrix gets for a tile: one table for each element type."""

from __future__ import annotations

from typing import Any

from moe_core.gemm.marlin import int4, int8, operand
from moe_core.gemm.marlin.layer import MarlinMatrix
from moe_core.gemm.plan import TileConfig


def integer_functions(matrix: MarlinMatrix, config: TileConfig) -> tuple[Any, Any, Any, Any]:
    """4- and 8-bit codes with or without zero points: (open_b, load_b, multiply, finish)."""
    codes = {4: int4, 8: int8}[matrix.bits]
    size, finish = matrix.group_size, None if matrix.factors is None else operand.finish_factors
    if size == -1:
        return operand.open_rows, codes.load_rows, codes.multiply_rows, operand.finish_rows
    if size == operand.STEP.value and config.block_m <= operand.FEW.value:
        # each step's product is scaled by itself: beyond, its sums take too many registers
        return operand.open_groups, codes.load_group, codes.multiply_group, finish
    load = {128: codes.load_groups_1, 64: codes.load_groups_2, 32: codes.load_groups_4}[size]
    return operand.open_groups, load, codes.multiply_groups, finish
