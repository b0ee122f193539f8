"""torch's CPU GEMM of bfloat16 activations and 4-bit weights, which reads codes directly.

``_weight_int4pack_mm_for_cpu`` dequantizes codes in registers, ``(code - 8) * scale + zero``, and accumulates in
float32. Scales, zeros and the result are bfloat16. What one pass cannot represent is added by further passes:

    int4, bfloat16 scales    (c - 8) s
    int4, otherwise          (c - 8) s + (8 - zp) s in two passes: upper halves of s and (8 - zp) s, then lower ones
    int8                     16 h s + (128 - zp + t) s, then l s and the remainder of the zero; two more passes if s
                             is not representable in bfloat16

For int8, ``c - 128 = 16 h + l + t`` with h and l from -8 to 7. Small codes have h = 0, so that no large terms cancel.
The range is -136 to 119; t is 8 in groups with a code of 120 or more, else 0.

Other activation dtypes use a slower path of the GEMM than dequantization. The layout is private to torch and
differs between instruction sets. :func:`available` tests whether it is the one that :func:`unpack` reads:

    [rows / 64, K, 32] bytes: byte j of column k holds rows j (low four bits) and j + 32 of 64
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

#: rows per tile of the layout
TILE = 64
#: group sizes that the GEMM supports
GROUPS = (128, 64, 32)
#: rows of activations, times passes, above which dequantization and a float32 GEMM are faster
MAX_ROWS = 128
#: float32 values of a dequantized block: 4 MB
_BLOCK = 2**20


def pack(codes: Tensor, bits: int, group: int, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pack canonical codes of one matrix for the GEMM.

    int4 takes one plane, int8 two: h, then l.

    Args:
        codes: uint8 [rows, K], 4 bits [rows, K/2]; rows a multiple of 64.
        bits: bits per code.
        group: columns per group.
        order: order of the columns, from :func:`column_blocks`.

    Returns:
        uint8 [planes, rows / 64, K, 32], and t, float32 [K / group, rows].
    """
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
    if order is not None:
        # padding positions may take any column: activations are 0 there
        codes = codes.index_select(1, order.clamp(max=codes.shape[1] - 1))
    rows, columns = codes.shape
    wide, planes = codes.to(torch.int32), []
    added = wide.new_zeros(rows, columns // group)
    if bits == 8:
        added = 8 * (wide.view(rows, -1, group).amax(dim=2) >= 248).int()
        # 16 (h + 8) + (l + 8), for a number from 0 to 255
        wide = wide + 8 - added.repeat_interleave(group, dim=1)
        planes.append(wide >> 4)
    planes.append(wide & 15)
    packed = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(plane, 2) for plane in planes]
    tiles = torch.stack([plane.view(rows // TILE, columns, TILE // 2) for plane in packed])
    return tiles, added.T.float()


def unpack(packed: Tensor, out: Tensor) -> None:
    """Unpack tiles to signed codes, relative to the middle of the code range.

    Args:
        packed: tiles [planes, T, K, 32].
        out: float32 [K, T * 64], overwritten.
    """
    planes, count, columns, _ = packed.shape
    tiles = out.view(columns, count, 2, TILE // 2).permute(2, 1, 0, 3)
    first = packed[0]
    if planes == 1:
        halves = ((first & 15).sub_(8), (first >> 4).sub_(8))
    else:
        last = packed[1]
        halves = ((first << 4).bitwise_or_(last & 15), (first & 240).bitwise_or_(last >> 4))
        halves = (halves[0].sub_(128), halves[1].sub_(128))
    for half, codes in zip(tiles, halves, strict=True):
        half.copy_(codes.view(torch.int8))


def column_blocks(g_idx: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Sort columns by group and pad each group to blocks of 32 columns.

    The number of blocks depends only on K and ``groups``.

    Args:
        g_idx: [K], the group of each column.
        groups: number of groups.

    Returns:
        int32 [blocks * 32], the column at each position, K for padding; and int64 [blocks], the group of each block.
    """
    size, own = GROUPS[-1], g_idx.long()
    columns = len(own)
    count = (columns + (size - 1) * groups) // size
    held = torch.bincount(own, minlength=groups)
    blocks = (held + size - 1) // size
    ordered = own.argsort(stable=True)
    group = own[ordered]
    rank = torch.arange(columns, device=own.device) - (held.cumsum(0) - held)[group]
    order = torch.full((count * size,), columns, dtype=torch.int32, device=own.device)
    order[size * (blocks.cumsum(0) - blocks)[group] + rank] = ordered.int()
    of_block = torch.zeros(count, dtype=torch.int64, device=own.device)
    used = torch.arange(groups, device=own.device).repeat_interleave(blocks)
    of_block[: len(used)] = used
    return order, of_block


def scales_and_zeros(scale: Tensor, zero_point: Tensor | None, bits: int, added: Tensor) -> Tensor:
    """Return scales and zeros of all passes of one matrix.

    Args:
        scale: [rows, G].
        zero_point: [rows, G]; None for the middle of the code range.
        bits: bits per code.
        added: t, [groups, rows], for G groups or a multiple.

    Returns:
        bfloat16 [passes, groups, rows, 2].
    """
    groups = len(added)
    repeats = groups // scale.shape[1]
    wide = scale.float().T.repeat_interleave(repeats, dim=0)
    middle = 2 ** (bits - 1)
    zeros = torch.zeros_like(wide)
    if zero_point is not None:
        zeros = (middle - zero_point.float().T.repeat_interleave(repeats, dim=0)) * wide
    # t adds a multiple of the group's sum, so it belongs to the zeros
    zeros = zeros + added * wide
    left = wide
    passes = []
    halves = 1 if scale.dtype is torch.bfloat16 and (bits == 8 or zero_point is None) else 2
    for _ in range(halves):
        upper = left.bfloat16()
        left = left - upper.float()
        for factor in (1,) if bits == 4 else (16, 1):
            zero = zeros.bfloat16()
            zeros = zeros - zero.float()
            passes.append(torch.stack((upper * factor, zero), dim=2))
    return torch.stack(passes)


def product(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Multiply activations by one matrix, transposed.

    With few rows, each pass's sums are rounded to bfloat16.

    Args:
        x: float32 [R, K] with values representable in bfloat16.
        packed: tiles of the matrix from :func:`pack`.
        scales: result of :func:`scales_and_zeros`.

    Returns:
        float32 [R, rows].
    """
    passes, groups, rows, _ = scales.shape
    planes, _, columns, _ = packed.shape
    if len(x) * passes > MAX_ROWS:
        return _dequantized_product(x, packed, scales)
    narrow, y = x.bfloat16(), None
    for number in range(passes):
        codes = packed[number % planes].view(rows, columns // 2)
        part = torch.ops.aten._weight_int4pack_mm_for_cpu(narrow, codes, columns // groups, scales[number])
        y = part.float() if y is None else y.add_(part)
    return x.new_zeros(len(x), rows) if y is None else y


def _dequantized_product(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    _, groups, rows, _ = scales.shape
    planes, all_tiles, columns, _ = packed.shape
    # in float32 one pass suffices: the last of each set has the scales of whole codes
    scale = scales[planes - 1 :: planes, ..., 0].float().sum(dim=0)
    zeros = scales[..., 1].float().sum(dim=0)
    if planes == 2:
        zeros -= 8 * scale
    added = bool(zeros.any())
    count = min(max(_BLOCK // (columns * TILE), 1), all_tiles)
    y = x.new_empty(len(x), rows)
    memory = x.new_empty(columns * TILE * count)
    for first in range(0, all_tiles, count):
        tiles = packed[:, first : first + count]
        block = slice(first * TILE, (first + tiles.shape[1]) * TILE)
        w = memory[: columns * TILE * tiles.shape[1]].view(columns, -1)
        unpack(tiles, w)
        by_group = w.view(groups, columns // groups, -1).mul_(scale[:, None, block])
        if added:
            by_group += zeros[:, None, block]
        torch.mm(x, w, out=y[:, block])
    return y


def group_of(size: int, rows: int, columns: int, *, permuted: bool = False) -> int | None:
    """Return the group size of the layout, or None if the weights do not fit it.

    Args:
        size: columns per group, -1 for whole rows.
        rows: rows of the matrix.
        columns: columns of the matrix.
        permuted: columns are grouped by activation order.
    """
    if rows % TILE:
        return None
    if permuted:
        return GROUPS[-1]
    return next((g for g in GROUPS if columns % g == 0 and (size < 0 or size == g)), None)


@functools.cache
def available() -> bool:
    """Return whether torch and the CPU support the exact GEMM, in the layout of :func:`unpack`."""
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return False
    rows, columns, group = 2 * TILE, 64, 32
    number = torch.arange(rows * columns // 2, dtype=torch.int64, device="cpu")
    codes = (number * 2654435761 >> 7).to(torch.uint8).view(rows, columns // 2)
    wide = torch.stack((codes & 15, codes >> 4), dim=2).view(rows, columns).float() - 8
    scale = torch.tensor([1.0, 0.5], dtype=torch.bfloat16, device="cpu").expand(rows, 2)
    try:
        packed, added = pack(codes, 4, group)
        # identity matrix: the GEMM returns the dequantized weights
        one = torch.eye(columns, dtype=torch.float32, device="cpu")
        found = product(one, packed, scales_and_zeros(scale, None, 4, added))
        tiles = torch.empty(columns, rows, dtype=torch.float32, device="cpu")
        unpack(packed, tiles)
    except RuntimeError:
        return False
    expected = wide * scale.float().repeat_interleave(group, dim=1)
    return torch.equal(found.T, expected) and torch.equal(tiles.T, wide)
