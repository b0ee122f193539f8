"""torch's own CPU products of bfloat16 activations and 4-bit weights, which read the codes as they are.

``_weight_int4pack_mm_for_cpu`` widens codes in registers, ``(code - 8) * scale``, and sums in float32; other dtypes of
activations take a path of it that is slower than dequantising.  Its layout is private to torch and differs between
instruction sets: :func:`available` finds out whether it is the one that :func:`unpack` reads,

    [rows / 64, K, 32] bytes: byte j of column k holds rows j (low nibble) and j + 32 of 64
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

#: rows of a tile of the layout
TILE = 64
#: sizes of groups that the product knows
GROUPS = (128, 64, 32)
#: rows of activations above which dequantising and multiplying in float32 is faster
MAX_ROWS = 128
#: float32 values of a block that is dequantised: 4 MB
_BLOCK = 2**20


def pack(codes: Tensor) -> Tensor:
    """Canonical nibbles of one matrix, uint8 [rows, K/2], as uint8 [rows / 64, K, 32]; ``rows`` a multiple of 64."""
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    wide = torch.stack((codes & 15, codes >> 4), dim=2).view(rows, columns)
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(wide.to(torch.int32), 2)
    return packed.view(rows // TILE, columns, TILE // 2)


def unpack(packed: Tensor, out: Tensor) -> None:
    """Codes - 8 of some tiles ``packed`` [T, K, 32], in ``out`` [K, T * 64] float32."""
    tiles = out.view(len(out), len(packed), 2, TILE // 2).permute(1, 0, 2, 3)
    tiles[:, :, 0].copy_((packed & 15).sub_(8).view(torch.int8))
    tiles[:, :, 1].copy_((packed >> 4).sub_(8).view(torch.int8))


def scales_and_zeros(scale: Tensor, group: int, columns: int) -> Tensor:
    """Scales [rows, G] bfloat16 of one matrix as [columns / group, rows, 2]; the zeros are what is added to values."""
    groups = columns // group
    per_group = scale.T if scale.shape[1] == groups else scale.T.repeat_interleave(groups // scale.shape[1], dim=0)
    return torch.stack((per_group, torch.zeros_like(per_group)), dim=2)


def product(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """``x`` [R, K] float32, values of bfloat16, times one matrix transposed: float32 [R, rows].

    Of few rows the sums are rounded to bfloat16.
    """
    groups, rows, _ = scales.shape
    columns = packed.shape[1]
    if len(x) > MAX_ROWS:
        return _dequantized_product(x, packed, scales)
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.bfloat16(), packed.view(rows, columns // 2), columns // groups, scales
    )
    return y.float()


def _dequantized_product(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    groups, rows, _ = scales.shape
    columns = packed.shape[1]
    count = min(max(_BLOCK // (columns * TILE), 1), len(packed))
    y = x.new_empty(len(x), rows)
    buffer = x.new_empty(columns * TILE * count)
    for first in range(0, len(packed), count):
        tiles = packed[first : first + count]
        block = slice(first * TILE, (first + len(tiles)) * TILE)
        w = buffer[: columns * TILE * len(tiles)].view(columns, -1)
        unpack(tiles, w)
        w.view(groups, columns // groups, -1).mul_(scales[:, None, block, 0])
        torch.mm(x, w, out=y[:, block])
    return y


def group_of(size: int, rows: int, columns: int) -> int | None:
    """Columns that share a scale in the layout, of weights in groups of ``size`` (-1: whole rows), or None."""
    if rows % TILE:
        return None
    return next((g for g in GROUPS if columns % g == 0 and (size < 0 or size == g)), None)


@functools.cache
def available() -> bool:
    """Whether this torch and CPU have the product, exact, in the layout that :func:`unpack` reads."""
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return False
    rows, columns, group = 2 * TILE, 64, 32
    number = torch.arange(rows * columns // 2, dtype=torch.int64)
    codes = (number * 2654435761 >> 7).to(torch.uint8).view(rows, columns // 2)
    wide = torch.stack((codes & 15, codes >> 4), dim=2).view(rows, columns).float() - 8
    scale = torch.tensor([1.0, 0.5], dtype=torch.bfloat16).expand(rows, 2)
    try:
        packed = pack(codes)
        # one column each: what comes out are the weights
        found = product(torch.eye(columns), packed, scales_and_zeros(scale, group, columns))
        tiles = torch.empty(columns, rows)
        unpack(packed, tiles)
    except RuntimeError:
        return False
    expected = wide * scale.float().repeat_interleave(group, dim=1)
    return torch.equal(found.T, expected) and torch.equal(tiles.T, wide)
