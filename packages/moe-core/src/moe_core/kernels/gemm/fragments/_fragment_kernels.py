"""The kernel of `fragment_order.order_words`."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.registers import split_last, unpack
from moe_core.kernels.gemm.fragments._fragment_bits import columns_apart, e2m1_bits, signs_apart

#: Operations of `fragment_order.ARRANGEMENTS`, compiled.
COMPILED = {each: triton.jit(each) for each in (columns_apart, e2m1_bits, signs_apart)}


@triton.jit
def order_kernel(
    codes,
    out,
    units,
    steps,
    stored,
    rows,
    half,
    operations,
    SIZES: tl.constexpr,
    DIMS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PER_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reorder int32 codes [E * rows, stored] into words [E, steps, rows, PER_STEP * 16].

    `units` is the number of units of 16 words. SIZES, DIMS (of the bytes, counted from 1) and operations are those of
    `fragment_order.ARRANGEMENTS`. INTERLEAVED: the `rows` of an expert, of which `half` are gates, are interleaved
    (`fragment_order.interleave`).
    """
    width = steps * PER_STEP
    unit = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (unit < units)[:, None]
    sixteen = tl.arange(0, 16)[None, :]
    column = (unit % width)[:, None] * 16 + sixteen
    tile = tl.load(codes + (unit // width)[:, None] * stored + column, mask=inside & (column < stored), other=0)
    byte = split_last(unpack(tile, 8).reshape((BLOCK,) + SIZES).permute((0,) + DIMS).reshape(BLOCK, 16, 4))
    words = byte[0] | (byte[1] << 8) | (byte[2] << 16) | (byte[3] << 24)
    for i in tl.static_range(len(operations)):
        words = operations[i](words)
    expert = unit // width // rows
    row = unit // width % rows
    if INTERLEAVED:
        up = row // half
        row = row % half // 8 * 16 + up * 8 + row % half % 8
        rows = tl.cdiv(half, 8) * 16
    place = ((expert * steps + unit % width // PER_STEP) * rows + row) * PER_STEP + unit % PER_STEP
    tl.store(out + place[:, None] * 16 + sixteen, words, mask=inside)
