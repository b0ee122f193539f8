"""Products with e2m1 weights, dequantized one block of rows at a time, in plain torch.

Two bytes (four codes) at a time are looked up in a table of 2^16 entries of four float32 values. The table takes 1 MB,
which fits a CPU's cache together with a block. This is six times as fast as extracting codes from bytes one by one.

Values are stored divided by 8: 6 times 2^127 overflows float32, and an infinite weight times zero is NaN. 0.5 times
2^-127 over 8 is still exact, as a subnormal number.
"""

from __future__ import annotations

import functools

import torch
from moe_core import E2M1_VALUES, e8m0_to_float32
from torch import Tensor

from moe_mxfp4.groups import GROUP

#: divisor of the dequantized values: a power of two above the largest code
_UNIT = 8.0
#: float32 values of a block on a CPU: 3 MB
_BLOCK = 3 * 2**18


def product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Multiply float32 activations by one e2m1 matrix, transposed.

    Args:
        x: float32 [R, K].
        codes: uint8 [rows, ceil(K / 2)], even columns in the low bits.
        scale: uint8 e8m0 [rows, ceil(K / 32)].

    Returns:
        float32 [R, rows].
    """
    rows, columns = len(codes), x.shape[1]
    step = rows if x.device.type != "cpu" else min(max(_BLOCK // max(columns, 1), 1), rows)
    out = x.new_empty(len(x), rows)
    for first in range(0, rows, max(step, 1)):
        block = slice(first, min(first + step, rows))
        torch.mm(x, eighths(codes[block], scale[block], columns).T, out=out[:, block])
    return out.mul_(_UNIT)


def eighths(codes: Tensor, scale: Tensor, columns: int) -> Tensor:
    """Dequantize to an eighth of the weights' values, finite and exact.

    Args:
        codes: canonical uint8 codes [rows, ceil(columns / 2)].
        scale: uint8 e8m0 [rows, ceil(columns / 32)].
        columns: number of columns.

    Returns:
        float32 [rows, columns].
    """
    rows, width = codes.shape
    codes = codes.contiguous()
    whole = width % 2 == 0 and codes.storage_offset() % 2 == 0
    index = codes.view(torch.int16).int().bitwise_and_(0xFFFF) if whole else codes.int()
    values = _table(whole, codes.device).index_select(0, index.flatten()).view(rows, 2 * width)[:, :columns]
    powers = e8m0_to_float32(scale)[:, :, None]
    groups = columns // GROUP
    values[:, : groups * GROUP].view(rows, groups, GROUP).mul_(powers[:, :groups])
    if columns % GROUP:
        values[:, groups * GROUP :].mul_(powers[:, -1])
    return values


@functools.cache
def _table(two: bool, device: torch.device) -> Tensor:
    """Build the lookup table of a byte, [256, 2], or of ``two`` [65536, 4], low codes first."""
    value = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=device) / _UNIT
    one = torch.stack((value.repeat(16), value.repeat_interleave(16)), dim=1)
    return torch.cat((one.repeat(256, 1), one.repeat_interleave(256, 0)), dim=1) if two else one
