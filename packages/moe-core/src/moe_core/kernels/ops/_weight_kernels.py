"""Kernels of `moe_core.kernels.ops.quantize_weights`.

Weights are [E, parts * part_rows, cols]: `parts` stacked matrices per expert, each with separate scales. Values are
read once (twice if one scale covers the matrix) and written once. The bits are those of
`moe_core.reference.quantization`.

A GPU that reads 4 TB/s has a budget of about 20 instructions per value, so few are spent: one for the largest magnitude
(the maximum that propagates NaN takes magnitudes for free), four for a quotient, none to saturate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.casts import INTERPRET, NAN, round_e2m1
from moe_core.kernels.ops._quantize_kernels import (
    AMAX_FLOOR,
    divide_by,
    divisor_of,
    encode,
    largest_magnitude,
    magnitude_bits,
    scale_of,
    store_scale,
)

_SIGN = tl.constexpr(-0x80000000)


@triton.jit
def codes_of(x, bits, CODE: tl.constexpr, SCALE: tl.constexpr, dtype: tl.constexpr):
    """Return the codes and scales of float32 x, for largest magnitudes `bits` of its groups.

    `bits` must cover every value. Quotients are then at most 448 * (1 + 2**-23), which e4m3 rounds to 448, so no
    saturation is needed.
    """
    if CODE == "e4m3" and SCALE == "e8m0" and not INTERPRET:
        # 2**ceil(log2(amax / 448)) in integer arithmetic: 448 is 1.75 * 2**8, and beyond 1.75 * 2**n the exponent goes
        # up
        floor = tl.full(bits.shape, AMAX_FLOOR, tl.float32).to(tl.int32, bitcast=True)
        exponent = ((tl.maximum(bits, floor) + 0x1FFFFF) >> 23) - 8
        finite = bits < 0x7F800000
        scale = tl.where(finite, exponent << 23, 0x7FC00000).to(tl.float32, bitcast=True)
        # a product with a power of two is as exact as the quotient
        inverse = tl.where(finite, (254 - exponent) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
        return (x * inverse).to(dtype), scale
    scale = scale_of(bits, CODE, SCALE)
    divisor, inverse = divisor_of(scale)
    if CODE == "e4m3" and not INTERPRET:
        # like `divide_by`; one instruction restores the sign of zeros
        quotient = x * inverse
        quotient = tl.fma(tl.fma(-quotient, divisor, x), tl.broadcast_to(inverse, x.shape), quotient)
        signed = quotient.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & _SIGN)
        return signed.to(tl.float32, bitcast=True).to(dtype), scale
    else:
        return encode(divide_by(x, divisor, inverse), CODE, dtype), scale


@triton.jit
def run_kernel(
    w,
    out,
    scales,
    runs,
    size,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize ROWS runs of consecutive values per program.

    A run has `size` <= TILE values and one scale: scales [runs].
    """
    first = tl.program_id(0) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, TILE)[None, :]
    inside = (first + row < runs) & (column < size)
    # 64-bit offset of the program, 32-bit offsets within
    w += first.to(tl.int64) * size
    out += first.to(tl.int64) * size
    place = row * size + column
    x = tl.load(w + place, mask=inside, other=0.0).to(tl.float32)
    codes, scale = codes_of(x, largest_magnitude(x, 1, True), CODE, SCALE, out.dtype.element_ty)
    tl.store(out + place, codes, mask=inside)
    store_scale(scales + first + row, scale, first + row < runs, SCALE)


@triton.jit
def pair_kernel(w, out, scales, runs, SIZE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    """Quantize ROWS runs of SIZE values per program to e2m1 with e8m0 scales.

    A byte holds two codes, the even one in the low bits.
    """
    first = tl.program_id(0) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    byte = tl.arange(0, SIZE // 2)[None, :]
    inside = first + row < runs
    # 64-bit offset of the program, 32-bit offsets within
    w += first.to(tl.int64) * SIZE
    out += first.to(tl.int64) * (SIZE // 2)
    x = tl.load(w + row * SIZE + column, mask=inside & (column < SIZE), other=0.0).to(tl.float32)
    scale = scale_of(largest_magnitude(x, 1, True), "e2m1", "e8m0")
    # a product with a power of two is as exact as the quotient; scales are rounded up, so no value exceeds 6
    rounded = round_e2m1(tl.abs(x * (0x7F000000 - magnitude_bits(scale)).to(tl.float32, bitcast=True)))
    bits = rounded.to(tl.int32, bitcast=True)
    # the code is the exponent and the first mantissa bit; 0.5 is subnormal
    codes = tl.where(rounded < 1.0, (rounded * 2.0).to(tl.int32), (bits >> 22) - 252)
    codes = (codes & 7) | ((x.to(tl.int32, bitcast=True) >> 28) & 8)
    low, high = codes.reshape(ROWS, SIZE // 2, 2).split()
    tl.store(out + row * (SIZE // 2) + byte, (low | (high << 4)).to(tl.uint8), mask=inside & (byte < SIZE // 2))
    store_scale(scales + first + row, scale, inside, "e8m0")


@triton.jit
def block_kernel(
    w,
    out,
    scales,
    part_rows,
    cols,
    grid_rows,
    grid_cols,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize one block of ROW x COL values per program, in a power-of-two tile.

    scales [E, parts, grid rows, columns]
    """
    block = tl.program_id(0)
    grid_col = block % grid_cols
    grid_row = (block // grid_cols) % grid_rows
    matrix = (block // (grid_cols * grid_rows)).to(tl.int64)
    row = tl.arange(0, TILE_ROWS)[:, None]
    col = tl.arange(0, TILE_COLS)[None, :]
    inside = (row < tl.minimum(part_rows - grid_row * ROW, ROW)) & (col < tl.minimum(cols - grid_col * COL, COL))
    # 64-bit offset of the block, 32-bit offsets within
    first = (matrix * part_rows + grid_row * ROW) * cols + grid_col * COL
    w += first
    out += first
    place = row * cols + col
    x = tl.load(w + place, mask=inside, other=0.0).to(tl.float32)
    # reduce over rows first: most of them are in the same thread
    bits = largest_magnitude(largest_magnitude(x, 0, True).to(tl.float32, bitcast=True), 1, True)
    codes, scale = codes_of(x, bits, CODE, SCALE, out.dtype.element_ty)
    tl.store(out + place, codes, mask=inside)
    one = tl.zeros([1, 1], dtype=tl.int32)
    store_scale(scales + block + one, scale, one == 0, SCALE)


@triton.jit
def matrix_amax_kernel(w, bits, count, chunks, BLOCK: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr):
    """Compute the largest magnitude (as bits) of contiguous matrices of `count` values.

    The result bits [matrices] must be zero before. One program per chunk of STEPS * BLOCK values.
    """
    matrix = (tl.program_id(0) // chunks).to(tl.int64)
    start = (tl.program_id(0) % chunks).to(tl.int64) * (STEPS * BLOCK)
    w += matrix * count + start
    left = count - start
    place = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(STEPS):
        x = tl.load(w + step * BLOCK + place, mask=step * BLOCK + place < left, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x), propagate_nan=NAN)
    tl.atomic_max(bits + matrix + tl.arange(0, 1), largest_magnitude(largest, 0, True))


@triton.jit
def matrix_codes_kernel(
    w, out, scales, bits, count, chunks, BLOCK: tl.constexpr, CODE: tl.constexpr, PDL: tl.constexpr
):
    """Quantize contiguous matrices of `count` values.

    The scales [matrices] follow from the largest magnitudes.
    """
    matrix = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    start = chunk.to(tl.int64) * BLOCK
    w += matrix * count + start
    out += matrix * count + start
    place = tl.arange(0, BLOCK)
    inside = place < count - start
    x = tl.load(w + place, mask=inside, other=0.0).to(tl.float32)
    one = tl.arange(0, 1)
    codes, scale = codes_of(x, tl.load(bits + matrix + one), CODE, "float32", out.dtype.element_ty)
    tl.store(out + place, codes, mask=inside)
    tl.store(scales + matrix + one, scale, mask=one + chunk == 0)
