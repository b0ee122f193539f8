"""The kernel of `words`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _byte(words, number):
    return (words >> (8 * number)) & 255


@triton.jit
def _nibble_word(w0, w1, w2, w3, t):
    """Word of thread t: byte t of each of four canonical words."""
    b0 = _byte(w0, t)
    b1 = _byte(w1, t)
    b2 = _byte(w2, t)
    b3 = _byte(w3, t)
    low = (b0 & 15) | ((b1 & 15) << 4) | ((b2 & 15) << 8) | ((b3 & 15) << 12)
    high = (b0 >> 4) | ((b1 >> 4) << 4) | ((b2 >> 4) << 8) | ((b3 >> 4) << 12)
    return low | (high << 16)


@triton.jit
def _byte_word(first, second, at):
    """Word of bytes at and at + 1 of the words of both halves of 16 columns."""
    low = _byte(first, at) | (_byte(second, at) << 8)
    return low | ((_byte(first, at + 1) | (_byte(second, at + 1) << 8)) << 16)


@triton.jit
def order_kernel(
    codes,
    out,
    units,
    width,
    rows,
    half,
    BITS: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """int32 [units, 16] of canonical codes to int32 [units, 16] in the order of `words`; a row has `width` units.

    HALVES: the `rows` of an expert, of which `half` are gates, go to turns of 8 (`rows.interleave`).
    """
    unit = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (unit < units)[:, None]
    sixteen = tl.arange(0, 16)[None, :]
    tile = tl.load(codes + unit[:, None] * 16 + sixteen, mask=inside, other=0)
    if BITS == 4:
        # [unit, u, p]: canonical word 4u + p, of which thread t takes byte t
        even, odd = tile.reshape(BLOCK, 4, 2, 2).split()
        w0, w2 = even.split()
        w1, w3 = odd.split()
        v0 = _nibble_word(w0, w1, w2, w3, 0)
        v1 = _nibble_word(w0, w1, w2, w3, 1)
        v2 = _nibble_word(w0, w1, w2, w3, 2)
        v3 = _nibble_word(w0, w1, w2, w3, 3)
    else:
        # [unit, s, j, t // 2]: bytes 16s + 8j + 2t + i, of which thread t takes four
        lower, upper = tile.reshape(BLOCK, 4, 2, 2).split()
        first, second = lower.split()
        v0 = _byte_word(first, second, 0)
        v1 = _byte_word(first, second, 2)
        third, fourth = upper.split()
        v2 = _byte_word(third, fourth, 0)
        v3 = _byte_word(third, fourth, 2)
    # [unit, u or s, t % 2, t // 2] to [unit, t, u or s]
    words = tl.join(tl.join(v0, v1), tl.join(v2, v3)).permute(0, 3, 2, 1).reshape(BLOCK, 16)
    place = unit
    if HALVES:
        number = unit // width
        expert = number // rows
        within = number % rows
        up = within // half
        source = within % half
        turns = tl.cdiv(half, 8) * 16
        place = (expert * turns + source // 8 * 16 + up * 8 + source % 8) * width + unit % width
    tl.store(out + place[:, None] * 16 + sixteen, words, mask=inside)
