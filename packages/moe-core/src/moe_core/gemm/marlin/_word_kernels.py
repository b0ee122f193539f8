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
def _moved(words, MASK: tl.constexpr, SHIFT: tl.constexpr):
    """Bits of a nibble in both halves of a word, at other places."""
    return (words & (MASK * 0x10001)) << SHIFT


@triton.jit
def _spread(words):
    """Words of nibbles with the bits of e2m1 where `words` says."""
    second = words >> 4
    third = words >> 8
    fourth = words >> 12
    out = _moved(words, 7, 6) | _moved(words, 8, 12) | _moved(second, 7, 3) | _moved(second, 8, 9)
    out = out | _moved(third, 7, 0) | _moved(third, 8, 6)
    return out | _moved(fourth, 1, 13) | _moved(fourth, 6, 9) | _moved(fourth, 8, 11)


@triton.jit
def _signs(half):
    """The signs of four nibbles, at bits 3, 11, 19 and 27."""
    return (half & 8) | ((half & 0x80) << 4) | ((half & 0x800) << 8) | ((half & 0x8000) << 12)


@triton.jit
def _e4m3_word(lower, upper, t):
    """Word of thread t: half t % 2 of words of both halves of 32 columns."""
    low = (lower >> (16 * (t % 2))) & 0xFFFF
    high = (upper >> (16 * (t % 2))) & 0xFFFF
    return (low & 0x7777) | ((high & 0x7777) << 16) | (_signs(low) << 4) | _signs(high)


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
    ORDER: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """int32 [units, 16] of canonical codes to int32 [units, 16] in the order of `words`; a row has `width` units.

    INTERLEAVE: the `rows` of an expert, of which `half` are gates, are interleaved in blocks of 8 (`words.interleave`).
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
        if ORDER == "e4m3":
            v0 = _e4m3_word(w0, w2, 0)
            v1 = _e4m3_word(w0, w2, 1)
            v2 = _e4m3_word(w1, w3, 2)
            v3 = _e4m3_word(w1, w3, 3)
        else:
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
    if ORDER == "e2m1":
        words = _spread(words)
    place = unit
    if INTERLEAVE:
        number = unit // width
        expert = number // rows
        within = number % rows
        up = within // half
        source = within % half
        turns = tl.cdiv(half, 8) * 16
        place = (expert * turns + source // 8 * 16 + up * 8 + source % 8) * width + unit % width
    tl.store(out + place[:, None] * 16 + sixteen, words, mask=inside)
