"""Which device functions a matrix gets for a tile: one table for each element type."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.gemm.marlin import integers, operand
from moe_core.gemm.marlin.dequant import int8_values
from moe_core.gemm.marlin.gemv import GemvFunctions
from moe_core.gemm.marlin.gemv_int4 import int4_placed
from moe_core.gemm.marlin.weight import MarlinMatrix
from moe_core.gemm.plan import TileConfig

#: by bits: loads for rows with one scale, for a group per step, and by columns of a group
_LOADS = {
    4: (
        integers.load_rows_4,
        integers.load_group_4,
        {128: integers.load_groups_4_1, 64: integers.load_groups_4_2, 32: integers.load_groups_4_4},
    ),
    8: (
        integers.load_rows_8,
        integers.load_group_8,
        {128: integers.load_groups_8_1, 64: integers.load_groups_8_2, 32: integers.load_groups_8_4},
    ),
}
#: n up to which bytes with scales of groups need no tiles for one token: a scale comes with every 16 bytes
_LARGEST_BYTES = 1024


def integer_functions(matrix: MarlinMatrix, config: TileConfig) -> tuple[Any, Any, Any, Any]:
    """4- and 8-bit codes with or without zero points: (open_b, load_b, multiply, scale_acc)."""
    load_rows, load_group, load_groups = _LOADS[matrix.bits]
    size, scale_acc = matrix.group_size, None if matrix.channel_scales is None else operand.scale_acc_channels
    if size == -1:
        return operand.open_rows, load_rows, integers.multiply_rows, operand.scale_acc_rows
    if size == operand.STEP.value and config.block_m <= operand.FEW.value:
        # each step's product is scaled by itself: beyond, its sums take too many registers
        return operand.open_groups, load_group, integers.multiply_group, scale_acc
    return operand.open_groups, load_groups[size], integers.multiply_groups, scale_acc


def integer_gemv(matrix: MarlinMatrix) -> GemvFunctions | None:
    """4- and 8-bit codes with or without zero points, one token; None where tiles were measured ahead."""
    scales = "zero" if matrix.scales.dtype == torch.int32 else "row" if matrix.group_size == -1 else "group"
    if matrix.bits == 4:
        return GemvFunctions(int4_placed, scales, placed=True)
    if scales != "row" and matrix.n > _LARGEST_BYTES:
        return None
    return GemvFunctions(int8_values, scales)
