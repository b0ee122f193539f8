"""The kernel of `scales`."""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(128)


@triton.jit
def order_scales_kernel(
    scale,
    zero_point,
    out,
    rows,
    groups,
    width,
    INTERLEAVE: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """[E, rows, groups] to [E, groups, width]; INTERLEAVE: rows are interleaved in blocks of 8, see `words.interleave`.

    With zero points the result is int32: their bits in place of the last of a float32, which is rounded to fit.
    """
    blocks = tl.cdiv(rows, ROWS)
    expert = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * 16 + tl.arange(0, 16)
    inside = (row < rows)[:, None] & (group < groups)[None, :]
    source = expert * rows * groups + row[:, None] * groups + group[None, :]
    value = tl.load(scale + source, mask=inside, other=0.0).to(tl.float32)
    place = row
    if INTERLEAVE:
        half = rows // 2
        place = row % half // 8 * 16 + row // half * 8 + row % half % 8
    target = expert * groups * width + group[None, :] * width + place[:, None]
    if zero_point is None:
        tl.store(out + target, value, mask=inside)
    else:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + (1 << (ZERO_BITS - 1))) & -(1 << ZERO_BITS)
        zero = tl.load(zero_point + source, mask=inside, other=0).to(tl.int32)
        tl.store(out + target, bits | zero, mask=inside)
