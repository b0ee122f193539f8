"""int4 weights unpacked to int8 in registers, for MMAs with int8 activations (W4A8).

    weights       uint8 [E, rows, bytes], two codes of -8 .. 7 in a byte, in the order of `moe_int8.layout.pack_int4`
    scales        by channel float32 [E, rows, 1]; by group float32 [E, groups, rows]
    activations   int8 [M, K padded to whole steps], as `moe_int8.kernels.scaled_mm` quantizes them

A code in the upper half of a byte, read as int8, is 16 times the code, sign included. An AND extracts the upper codes
of four bytes at a time, a shift and an AND the lower ones; the factor 1 / 16 is folded into the scale. A step of 2 P
columns takes P bytes, with the first P columns in the lower codes, so both halves are multiplied with contiguous
activation tiles.

Sums of codes are exact in int32: 16 * 8 is the 128 of `moe_int8.kernels.scaled_mm`. With group scales, each group's sum
is scaled and added in float32.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from moe_core.api.kernels import (
    INTERPRET,
    LOAD_PARTS,
    ScaledMMFunctions,
    as_row,
    load_unquantized,
    multiply_codes,
    scale_acc_tokens,
    specialize,
    wait_for_mma,
    weight_rows,
    weight_tile,
)

from moe_int8.kernels.scaled_mm import INT8, INT8_ZERO, open_sums, scale_acc_zero

# groups per step, 1 or 2; 0: one scale per row. Set by `specialize`
GROUPS = tl.constexpr(0)

_UNPACK = tl.constexpr(
    """
    {
        .reg .b32 up;
        shl.b32 up, $2, 4;
        and.b32 $0, up, 0xf0f0f0f0;
        and.b32 $1, $2, 0xf0f0f0f0;
    }
    """
)


@triton.jit
def unpack(words):
    """Unpack the (lower, upper) codes of uint8 bytes as int8 numbers, 16 times as large."""
    if INTERPRET:
        wide = words.to(tl.int32)
        return (wide << 4).to(tl.int8), (wide & 0xF0).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(_UNPACK, "=&r,=r,r", [words], dtype=(tl.int8, tl.int8), is_pure=True, pack=4)


@triton.jit
def open_groups(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """Open int4 weights with group scales.

    b_args = (bytes, scales [E, groups, rows], byte strides per expert, row and step, scale stride per expert, -, scale
    stride per group).
    """
    words, scales, stride_e, stride_n, _, scale_e, _, scale_g = b_args
    rows, inside, first = weight_rows(words, stride_e, stride_n, expert, half, n, N, BLOCK_N)
    columns = half * N + tl.minimum(n + tl.arange(0, BLOCK_N), N - 1)
    return rows, inside, scales + expert.to(tl.int64) * scale_e + columns, first, scale_g


@triton.jit
def load_packed(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Load a tile [BLOCK_N, BLOCK_K / 2] of bytes and each group's scales [BLOCK_N].

    Rows are padded to whole steps.
    """
    scales = ()
    for i in tl.static_range(GROUPS):
        scales += (tl.load(state[2] + (GROUPS * k + i) * state[4]),)
    tile = weight_tile(state[0], state[1], state[3], b_desc, k, K, BLOCK_K // 2, EVEN_N, True)
    return tile, (0.0 if GROUPS == 0 else scales)


@triton.jit
def multiply(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """Compute acc + 16 a @ b.T in int32; with groups, scale each group's sum and add in float32."""
    low, high = unpack(b)
    if GROUPS == 0:
        acc = multiply_codes(acc, a[0], 0.0, low, 0.0, SWAP_AB)
        return wait_for_mma(multiply_codes(acc, a[1], 0.0, high, 0.0, SWAP_AB))
    else:
        zeros = tl.zeros(acc.shape, tl.int32)
        sums = multiply_codes(zeros, a[0], 0.0, low, 0.0, SWAP_AB)
        if GROUPS == 2:
            acc += _scaled(sums, b_scale[0], SWAP_AB)
            sums = zeros
        sums = multiply_codes(sums, a[1], 0.0, high, 0.0, SWAP_AB)
        return acc + _scaled(sums, b_scale[GROUPS - 1], SWAP_AB)


@triton.jit
def _scaled(sums, scale, SWAP_AB: tl.constexpr):
    """Convert int32 sums to float32 and multiply by a scale per channel."""
    return sums.to(tl.float32) * as_row(scale, SWAP_AB)


#: activation tiles for the lower and the upper codes, quantized in registers
_LOAD_UNQUANTIZED = specialize(LOAD_PARTS[2], load_values=load_unquantized)
_OPEN_GROUPS_SUMS = specialize(open_sums, open_weights=open_groups)
_SCALE_ACC_ZERO = specialize(scale_acc_zero, scale_acc=scale_acc_tokens)
#: load_b and multiply, keyed by groups per step
_GROUPS = {
    groups: (specialize(load_packed, GROUPS=groups), specialize(multiply, GROUPS=groups)) for groups in (0, 1, 2)
}


def functions_of(group_size: int, *, zero_points: bool) -> ScaledMMFunctions:
    """Build the GEMM functions for a group size.

    Args:
        group_size: 32, 64 or 128 columns, or -1 for channel scales.
        zero_points: operands end with the row sums of the weights: int32, times 16 (channel scales), or scaled float32
            (group scales).

    Returns:
        The device functions with their constants.
    """
    load_weights, multiplied = _GROUPS[0 if group_size == -1 else 1 if group_size == 128 else 2]
    base = INT8_ZERO if zero_points else INT8
    tile = base.tile._replace(load_a=LOAD_PARTS[2], load_b=load_weights, multiply=multiplied)
    if group_size != -1:
        tile = tile._replace(
            open_b=_OPEN_GROUPS_SUMS if zero_points else open_groups,
            scale_acc=_SCALE_ACC_ZERO if zero_points else scale_acc_tokens,
            accumulate=tl.constexpr(tl.float32),
        )
    return replace(
        base,
        tile=tile,
        load_unquantized=None if zero_points else _LOAD_UNQUANTIZED,
        packed=2,
        block_k=128 if group_size == -1 else min(2 * group_size, 128),
    )
