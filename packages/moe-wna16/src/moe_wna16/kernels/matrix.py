"""The integer weights of a layer, as the fused layer takes them."""

from __future__ import annotations

from moe_core.experts_api import ActivationKind
from moe_core.kernel_api import (
    LOAD_PARTS,
    STEP,
    GemmWeight,
    TileFunctions,
    load_values,
    open_plain,
    open_values,
    packed_weight,
)
from torch import Tensor

from moe_wna16.kernels import codes

#: depth where columns have groups of their own, and of float32 products, which no tensor core computes
SHORT_STEP = 32


def code_weight(
    words: Tensor,
    bits: int,
    rows: int,
    columns: int,
    group_size: int,
    scales: Tensor,
    zero_points: Tensor | None = None,
    column_groups: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    kind: ActivationKind = ActivationKind.PLAIN,
    step: int = STEP,
) -> GemmWeight:
    """Words of codes, see `packed_weight`; ``kind`` PLAIN or, beside codes of 4 bits, TOKEN.

    - ``scales`` [E, groups, rows] bfloat16, float16 or float32, ``zero_points`` of that shape, uint8 or int16: without
      them the middle code; ``group_size`` columns share one, -1: all of a row; a ``step`` has 1, 2 or 4 of them
    - ``column_groups`` int32 [E, columns padded to 128], in the order of `tiles.arrange`: the group of each column
    """
    arguments = (
        words,
        scales,
        zero_points,
        column_groups,
        words.stride(0),
        words.stride(1),
        words.shape[2],
        scales.stride(0),
        scales.stride(1),
        0 if column_groups is None else column_groups.stride(0),
        scales.shape[1],
    )
    per_column = column_groups is not None
    functions = _functions(kind, bits=bits, group_size=group_size, per_column=per_column, step=step)
    return packed_weight(words, bits, rows, columns, arguments, functions, bias=bias, step=step)


def _functions(kind: ActivationKind, *, bits: int, group_size: int, per_column: bool, step: int) -> TileFunctions:
    quantized = kind is ActivationKind.TOKEN
    open_a = open_values if quantized else open_plain
    scale_acc = codes.scale_acc_tokens if quantized else None
    if per_column:
        load, multiply = codes.LOAD_COLUMNS[bits], codes.multiply_columns
        return TileFunctions(open_a, load_values, codes.open_groups, load, multiply, scale_acc)
    if group_size == -1:
        scale_acc = codes.scale_acc_rows_tokens if quantized else codes.scale_acc_rows
        load, multiply = codes.LOAD_ROWS[bits], codes.multiply_rows
        return TileFunctions(open_a, load_values, codes.open_rows, load, multiply, scale_acc)
    groups = step // group_size
    load, multiply = codes.LOAD_GROUPS[bits, groups], codes.multiply_groups
    return TileFunctions(open_a, LOAD_PARTS[groups], codes.open_groups, load, multiply, scale_acc)
