"""Dot products of codes and a vector in integers: `dp4a` multiplies and adds four bytes.

The vector's values become 16-bit integers, whose two bytes are multiplied separately. The 32 or 16 values that meet
four words share a power of two, chosen so that the largest has 15 bits. A bfloat16 of at least 2^-7 times the largest
keeps all its bits. The error of a smaller one is at most 2^-15 of the largest: a 128th of the error that rounding the
largest to bfloat16 may have.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.casts import INTERPRET


@triton.jit
def _fixed(x, by):
    """x * by, less than 2^15 in magnitude, rounded to the nearest integer, plus 0x4B400000.

    Adding 1.5 * 2^23 leaves the integer in these bits.
    """
    return (x * by + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _bytes(a, b, c, d):
    """The second bytes of four int32 in one word, and their lowest bytes in another."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 front, back; prmt.b32 front, $2, $3, 0x5140; prmt.b32 back, $4, $5, 0x5140; "
        "prmt.b32 $0, front, back, 0x7632; prmt.b32 $1, front, back, 0x5410; }",
        "=&r,=r,r,r,r,r",
        [a, b, c, d],
        dtype=[tl.int32, tl.int32],
        is_pure=True,
        pack=1,
    )


@triton.jit
def _add(codes, high, low, sums, x_sums):
    """Add products of `codes` with high and with low bytes to `sums`.

    The sums of x pass through, so that they are computed once, for the threads that hold the words.
    """
    return tl.inline_asm_elementwise(
        "dp4a.u32.s32 $0, $3, $4, $6; dp4a.u32.u32 $1, $3, $5, $7; mov.b32 $2, $8;",
        "=&r,=&r,=r,r,r,r,r,r,r",
        [codes, high[None, :], low[None, :], sums[0], sums[1], x_sums],
        dtype=[tl.int32, tl.int32, tl.int32],
        is_pure=True,
        pack=1,
    )


@triton.jit
def integer_dot(codes, values, MIDDLE: tl.constexpr, ADDED: tl.constexpr):
    """[N, Q, 4] sums over the values of words times `values`, and over `values` alone.

    ADDED: both are summed to [N, Q]. `codes`: one or two int32 [N, 4 * Q], whose bytes 0 and 2, then 1 and 3, are pairs
    of values plus MIDDLE. `values`: those of each pair, float32 [4 * Q], as `asm_values`. If one is not finite, neither
    is any sum of its four words.
    """
    N: tl.constexpr = codes[0].shape[0]
    Q: tl.constexpr = codes[0].shape[1] // 4
    WORDS: tl.constexpr = len(codes)
    # Magnitudes as integers: a NaN is the largest.
    most = values[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF
    for i in tl.static_range(1, 4 * WORDS):
        most = tl.maximum(most, values[i].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    # 2^14 <= the largest < 2^15; the powers remain normal numbers.
    exponent = tl.maximum(tl.max(most.reshape(Q, 4), axis=1, keep_dims=True) >> 23, 32)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    down = tl.where(exponent == 255, float("nan"), ((exponent - 14) << 23).to(tl.float32, bitcast=True))
    up = tl.broadcast_to(up, (Q, 4)).reshape(4 * Q)
    q = (_fixed(values[0], up),)
    x_sums = q[0]
    for i in tl.static_range(1, 4 * WORDS):
        q += (_fixed(values[i], up),)
        x_sums += q[i]
    # Subtract one 0x4B400000 per value, modulo 2^32.
    x_sums = (x_sums - (WORDS * 0x2D000000))[None, :]
    if INTERPRET:
        x_sums = tl.broadcast_to(x_sums, codes[0].shape)
        total = -MIDDLE * x_sums
        for i in tl.static_range(4 * WORDS):
            byte = (codes[i // 2 % WORDS] >> (16 * (i % 2) + 8 * (i // 2 // WORDS))) & 255
            total += byte * (q[i] - 0x4B400000)[None, :]
    else:
        sums = (tl.zeros_like(x_sums), -MIDDLE * x_sums)
        for i in tl.static_range(WORDS):
            high, low = _bytes(q[2 * i], q[2 * (i + WORDS)], q[2 * i + 1], q[2 * (i + WORDS) + 1])
            high, low, x_sums = _add(codes[i], high, low, sums, x_sums)
            sums = (high, low)
        total = sums[0] * 256 + sums[1]
    total = total.reshape(N, Q, 4)
    x_sums = x_sums.reshape(N, Q, 4)
    if ADDED:
        total = tl.sum(total, axis=2)
        x_sums = tl.sum(x_sums, axis=2)
        down = down.reshape(Q)
    down = tl.expand_dims(down, 0)
    return total.to(tl.float32) * down, x_sums.to(tl.float32) * down
