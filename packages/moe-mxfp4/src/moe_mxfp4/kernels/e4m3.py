"""e2m1 weights converted to e4m3 in registers, for MMAs with e4m3 activations.

    words     int32 [E, steps, rows, words of 128 columns] in the order of
              `moe_core.kernels.gemm.fragments.fragment_order` ("e4m3")
    scales    float32 [E, rows, 1], powers of two that multiply the final sums
    powers    int32 [E, steps, rows], a byte for each of a step's four groups: its scale over the row's largest, times
              2^11, as an exponent of 0 to 11

The eight magnitudes of a code, times the group's scale, fit eight e4m3 bytes. Two exponent additions build this table,
a byte permutation looks up four codes at a time, and the signs are merged in. All e2m1 values are exact within twelve
powers of two; `moe_mxfp4.marlin_layout` drops smaller groups.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from moe_core.api.kernels import (
    E4M3,
    FEW,
    INTERPRET,
    factor_e4m3,
    join_last,
    open_weights,
    per_word,
    step_bytes,
    wait_for_mma,
    weight_tile,
)

# $0, $1: codes of the lower and of the upper half of the word $2, one per byte, as e4m3 values scaled by power $3.
# The table is that of 2^-5: bytes 0, 0x08, 0x10, 0x14 and 0x18, 0x1c, 0x20, 0x24 are 0, 0.5, 1, 1.5 and 2, 3, 4, 6.
_WIDEN = tl.constexpr(
    """
    {
        .reg .b32 low, high, code, sign;
        mad.lo.u32 low, $3, 0x08080800, 0x14100800;
        mad.lo.u32 high, $3, 0x08080808, 0x24201c18;
        and.b32 code, $2, 0x77777777;
        prmt.b32 $0, low, high, code;
        shr.u32 code, code, 16;
        prmt.b32 $1, low, high, code;
        lop3.b32 $0, $2, 0x80808080, $0, 0xea;
        shl.b32 sign, $2, 4;
        lop3.b32 $1, sign, 0x80808080, $1, 0xea;
    }
    """
)


@triton.jit
def _looked_up(words, power, HALF: tl.constexpr, BYTE: tl.constexpr):
    """Look up one byte of one half, like the inline assembly."""
    code = (words >> (16 * HALF + 4 * BYTE)) & 7
    sign = (words >> (8 * BYTE + (7 - 4 * HALF))) & 1
    magnitude = tl.where(code == 1, 8, 8 + 4 * code) + 8 * power
    return tl.where(code == 0, 0, magnitude) | (sign << 7)


@triton.jit
def _byte(word, NUMBER: tl.constexpr):
    return ((word >> (8 * NUMBER)) & 0xFF).to(tl.int8)


@triton.jit
def _columns(low, high):
    """Arrange the bytes of both halves' words [N, W] as e4m3 [N, 8 W].

    The splits and joins cancel out in the compiler: each register stays unchanged.
    """
    N: tl.constexpr = low.shape[0]
    W: tl.constexpr = low.shape[1]
    halves = ()
    for j in tl.static_range(4):
        halves += (tl.join(_byte(low, j), _byte(high, j)),)
    # of word 4t + u: half h, byte j; [unit, t, u, h, j] to [unit, u, h, t, j]
    bytes_ = join_last(halves).reshape(N, W // 16, 4, 4, 2, 4).permute(0, 1, 3, 4, 2, 5)
    return bytes_.reshape(N, W * 8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def widened(words, power):
    """Convert `words` [N, W] to e4m3 [N, 8 W], scaled by the `power` [N, W] of each word."""
    if INTERPRET:
        low = tl.zeros_like(words)
        high = tl.zeros_like(words)
        for byte in tl.static_range(4):
            low = low | (_looked_up(words, power, 0, byte) << (8 * byte))
            high = high | (_looked_up(words, power, 1, byte) << (8 * byte))
        return _columns(low, high)
    else:
        low, high = tl.inline_asm_elementwise(
            _WIDEN,
            "=&r,=&r,r,r",
            [words, power],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        return _columns(low, high)


@triton.jit
def open_words(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """Open packed weights with `open_weights` and append the powers.

    See `moe_core.kernels.gemm.tiles.scaled_mm.open_weights`; b_args ends with (powers, their strides per expert and
    step).
    """
    state = open_weights(b_args[:8], expert, half, n, N, BLOCK_N)
    powers, power_e, power_k = b_args[8:]
    columns = half * N + tl.minimum(n + tl.arange(0, BLOCK_N), N - 1)
    return state + (powers + expert.to(tl.int64) * power_e + columns, power_k)


@triton.jit
def load_words(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Load a tile [BLOCK_N, BLOCK_K / 8] of packed weights and their exponents [BLOCK_N].

    Rows are padded to whole steps.
    """
    powers = tl.load(state[5] + k * state[6])
    return weight_tile(state[0], state[1], state[3], b_desc, k, K, BLOCK_K // 8, EVEN_N, True, state[4]), powers


@triton.jit
def multiply_words(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """Compute acc + a @ b.T."""
    tl.static_assert(SWAP_AB, "weights come from registers: SWAP_AB only")
    numbers = factor_e4m3(widened(b, per_word(step_bytes(b_scale), b.shape[1], 1)))
    a = factor_e4m3(a)
    if acc.shape[1] <= FEW:
        # added step by step: Hopper's tensor cores keep fewer bits of a running sum
        return wait_for_mma(acc + tl.dot(numbers, tl.trans(a), out_dtype=tl.float32))
    else:
        # two accumulators per step do not fit the registers
        return wait_for_mma(tl.dot(numbers, tl.trans(a), acc, out_dtype=tl.float32))


#: e4m3 activations with e2m1 weights
E2M1 = replace(
    E4M3,
    tile=E4M3.tile._replace(open_b=open_words, load_b=load_words, multiply=multiply_words),
    packed=8,
)
