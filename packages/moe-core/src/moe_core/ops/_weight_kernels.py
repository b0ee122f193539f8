"""Device code of `moe_core.ops.quantize_weights` for scales that span several rows: blocks, and whole matrices.

Weights are [E, parts * part_rows, cols]: `parts` stacked matrices per expert, each with scales of its own.  Values are
read once (twice where one scale spans the matrix) and written once.  Bits are those of `moe_core.quantization`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.ops._quantize_kernels import divide_by, divisor_of, encode, magnitude_bits, scale_of, store_scale


@triton.jit
def stored_magnitude(w):
    """Magnitudes of stored values, as integers of as many bits in the order of the magnitudes."""
    if w.dtype == tl.float32:
        return magnitude_bits(w)
    else:
        return w.to(tl.int16, bitcast=True) & 0x7FFF


@triton.jit
def float32_magnitude(bits, dtype: tl.constexpr):
    """`magnitude_bits` of the float32 value that a `stored_magnitude` stands for."""
    if dtype == tl.float32:
        return bits
    else:
        return magnitude_bits(bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32))


@triton.jit
def block_kernel(
    w,
    out,
    scales,
    parts,
    part_rows,
    cols,
    grid_rows,
    grid_cols,
    w_expert,
    w_row,
    out_expert,
    out_row,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of ROW x COL values per program, in a tile of powers of two; scales [E, parts, block rows, cols]."""
    block = tl.program_id(0)
    grid_col = block % grid_cols
    grid_row = (block // grid_cols) % grid_rows
    matrix = block // (grid_cols * grid_rows)
    expert = (matrix // parts).to(tl.int64)
    row = tl.arange(0, TILE_ROWS)[:, None]
    col = tl.arange(0, TILE_COLS)[None, :]
    inside = (row < ROW) & (grid_row * ROW + row < part_rows) & (col < COL) & (grid_col * COL + col < cols)
    first = ((matrix % parts) * part_rows + grid_row * ROW).to(tl.int64)
    row = first + row
    col = grid_col * COL + col
    stored = tl.load(w + expert * w_expert + row * w_row + col, mask=inside, other=0.0)
    largest = tl.max(tl.max(stored_magnitude(stored), axis=1, keep_dims=True), axis=0, keep_dims=True)
    scale = scale_of(float32_magnitude(largest, stored.dtype), CODE, SCALE)
    place = tl.zeros([1, 1], dtype=tl.int64) + block
    store_scale(scales + place, scale, place >= 0, SCALE)
    divisor, inverse = divisor_of(scale)
    codes = encode(divide_by(stored.to(tl.float32), divisor, inverse), CODE, out.dtype.element_ty)
    tl.store(out + expert * out_expert + row * out_row + col, codes, mask=inside)


@triton.jit
def matrix_amax_kernel(w, bits, count, chunks, BLOCK: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr):
    """Largest magnitude (as bits) of contiguous matrices of `count` values: bits [matrices], zero before.

    One program per chunk of STEPS * BLOCK values.
    """
    matrix = (tl.program_id(0) // chunks).to(tl.int64)
    start = (tl.program_id(0) % chunks).to(tl.int64) * (STEPS * BLOCK)
    first = start + tl.arange(0, BLOCK)
    largest = stored_magnitude(tl.load(w + matrix * count + first, mask=first < count, other=0.0))
    for step in range(1, STEPS):
        index = first + step * BLOCK
        stored = tl.load(w + matrix * count + index, mask=index < count, other=0.0)
        largest = tl.maximum(largest, stored_magnitude(stored))
    tl.atomic_max(bits + matrix, float32_magnitude(tl.max(largest, axis=0), w.dtype.element_ty))


@triton.jit
def matrix_codes_kernel(
    w, out, scales, bits, count, chunks, BLOCK: tl.constexpr, CODE: tl.constexpr, PDL: tl.constexpr
):
    """Codes of contiguous matrices of `count` values, and their scales [matrices] from the largest magnitudes."""
    matrix = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    index = chunk.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    one = tl.zeros([1], dtype=tl.int32)
    scale = scale_of(tl.load(bits + matrix + one), CODE, "float32")
    tl.store(scales + matrix + one, scale, mask=one + chunk == 0)
    divisor, inverse = divisor_of(scale)
    values = tl.load(w + matrix * count + index, mask=index < count, other=0.0).to(tl.float32)
    codes = encode(divide_by(values, divisor, inverse), CODE, out.dtype.element_ty)
    tl.store(out + matrix * count + index, codes, mask=index < count)
