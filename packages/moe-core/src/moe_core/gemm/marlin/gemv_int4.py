"""4-bit codes times a vector in integers: `dp4a` multiplies four codes with four bytes and adds the products.

The vector's numbers become 16-bit integers, whose two bytes are multiplied apart.  The 32 that meet four words share a
power of two, with which the largest has 15 bits.  So a bfloat16 down to 2^-7 of it keeps all its bits, and a smaller
one is off by 2^-15 of the largest at most: a 128th of what rounding to bfloat16 may have changed that by.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.jit.casts import INTERPRET


@triton.jit
def _fixed(x, by):
    """x * by, less than 2^15 in magnitude, to the nearest integer, plus 0x4B400000: 1.5 * 2^23 leaves it there."""
    return (x * by + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _bytes(a, b, c, d):
    """The second bytes of four int32 in one, and their lowest bytes in another."""
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
def code_dot(words, values, ADDED: tl.constexpr):
    """[N, Q, 4] sums over the codes of words [N, 4 * Q], less 8, times `values`, and sums of those for each.

    ADDED: [N, Q], over four words.  `values`: eight times [4 * Q] float32, in the order of `asm_values`; where one is
    not finite, so is no sum of its four words.
    """
    N: tl.constexpr = words.shape[0]
    Q: tl.constexpr = words.shape[1] // 4
    # magnitudes as integers: a NaN is the largest
    most = values[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF
    for i in tl.static_range(1, 8):
        most = tl.maximum(most, values[i].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    # 2^14 <= the largest < 2^15; the powers stay normal numbers
    exponent = tl.maximum(tl.max(most.reshape(Q, 4), axis=1, keep_dims=True) >> 23, 32)
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    down = tl.where(exponent == 255, float("nan"), ((exponent - 14) << 23).to(tl.float32, bitcast=True))
    up = tl.broadcast_to(up, (Q, 4)).reshape(4 * Q)
    q_0, q_1, q_2, q_3 = _fixed(values[0], up), _fixed(values[1], up), _fixed(values[2], up), _fixed(values[3], up)
    q_4, q_5, q_6, q_7 = _fixed(values[4], up), _fixed(values[5], up), _fixed(values[6], up), _fixed(values[7], up)
    # less eight times 0x4B400000, modulo 2^32
    x_sums = ((q_0 + q_1) + (q_2 + q_3) + ((q_4 + q_5) + (q_6 + q_7)) - 0x5A000000)[None, :]
    if INTERPRET:
        x_sums = tl.broadcast_to(x_sums, words.shape)
        total = -8 * x_sums
        q = (q_0, q_1, q_2, q_3, q_4, q_5, q_6, q_7)
        for i in tl.static_range(8):
            total += ((words >> (16 * (i % 2) + 4 * (i // 2))) & 15) * (q[i] - 0x4B400000)[None, :]
    else:
        high_even, low_even = _bytes(q_0, q_4, q_1, q_5)
        high_odd, low_odd = _bytes(q_2, q_6, q_3, q_7)
        # the sums of x go through, so that they are made once, for the threads that have the words
        total, x_sums = tl.inline_asm_elementwise(
            "{ .reg .b32 even, odd, low, high; mov.b32 high, 0; mul.lo.s32 low, $7, -8; "
            "and.b32 even, $2, 0x0f0f0f0f; shr.u32 odd, $2, 4; and.b32 odd, odd, 0x0f0f0f0f; "
            "dp4a.u32.s32 high, even, $3, high; dp4a.u32.u32 low, even, $4, low; "
            "dp4a.u32.s32 high, odd, $5, high; dp4a.u32.u32 low, odd, $6, low; "
            "mad.lo.s32 $0, high, 256, low; mov.b32 $1, $7; }",
            "=&r,=r,r,r,r,r,r,r",
            [words, high_even[None, :], low_even[None, :], high_odd[None, :], low_odd[None, :], x_sums],
            dtype=[tl.int32, tl.int32],
            is_pure=True,
            pack=1,
        )
    total = total.reshape(N, Q, 4)
    x_sums = x_sums.reshape(N, Q, 4)
    if ADDED:
        total = tl.sum(total, axis=2)
        x_sums = tl.sum(x_sums, axis=2)
        down = down.reshape(Q)
    down = tl.expand_dims(down, 0)
    return total.to(tl.float32) * down, x_sums.to(tl.float32) * down
