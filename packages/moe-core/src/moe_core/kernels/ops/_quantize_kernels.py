"""Kernels of `moe_core.kernels.ops.activation` and `moe_core.kernels.ops.quantize`.

Every kernel reads rows of x [B, T, C], optionally adds a bias and applies an activation, and writes or quantizes the
result, so that each value crosses memory once. Scales follow `moe_core.reference.quantization`: scale = amax /
max_value, code = round(value / scale), with the same bits as the PyTorch implementation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.activation import activate_gated, activate_plain
from moe_core.kernels.device.casts import INTERPRET, NAN, clamp, downcast, downcast_e4m3
from moe_core.kernels.device.pdl import begin_pdl
from moe_core.kernels.ops._exact_kernels import round_half_even
from moe_core.spec import numerics

# lower bound of amax, which keeps the scale of zeros normal and finite
AMAX_FLOOR = tl.constexpr(numerics.AMAX_FLOOR)
# larger values are NaN
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def max_code(CODE: tl.constexpr):
    """Return the largest value of an element type, as a constant."""
    return 448.0 if CODE == "e4m3" else 6.0 if CODE == "e2m1" else 127.0


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x|, integers ordered like the magnitudes.

    Infinity and then NaN are above every number.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def finite_bits(x):
    """Return `magnitude_bits` of finite numbers and 0 for others.

    For scales that several tokens share.
    """
    bits = magnitude_bits(x)
    return tl.where(bits < INFINITY_BITS, bits, 0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=NAN)


@triton.jit
def largest_magnitude(x, AXIS: tl.constexpr, KEEP: tl.constexpr = False):
    """Return `magnitude_bits` of the largest |x| along an axis, which KEEP retains."""
    if INTERPRET or not tl.target_info.is_cuda():
        return tl.max(magnitude_bits(x), axis=AXIS, keep_dims=KEEP)
    else:
        # a single instruction, which takes the magnitude and propagates NaN
        return tl.reduce(tl.abs(x), AXIS, _larger, keep_dims=KEEP).to(tl.int32, bitcast=True)


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """Compute `largest_magnitude` with the warp-wide integer maximum, for whole rows."""
    return tl.max(magnitude_bits(x), axis=AXIS)


@triton.jit
def has_nan(tile, AXIS: tl.constexpr):
    """Report whether there is a NaN along AXIS."""
    return largest(tile, AXIS) > INFINITY_BITS


@triton.jit
def is_finite(tile, AXIS: tl.constexpr):
    """Report whether all values along AXIS are finite."""
    return largest(tile, AXIS) < INFINITY_BITS


@triton.jit
def scale_of(bits, CODE: tl.constexpr, SCALE: tl.constexpr):
    """Return the float32 scale, amax / max_value, for the largest magnitude `bits`.

    NaN and infinity propagate. SCALE "pow2" and "e8m0" round it up to a power of two, or NaN if it is not finite.
    "even" and "down" are other rounding modes, for scales of e2m1 and e4m3.
    """
    amax = bits.to(tl.float32, bitcast=True)
    amax = tl.where(amax < AMAX_FLOOR, AMAX_FLOOR, amax)
    if SCALE == "even" or SCALE == "down":
        exact = amax.to(tl.int32, bitcast=True)
        # half a unit in the last place of a code's mantissa; 6 is 1.5 * 2**2, 448 is 1.75 * 2**8
        HALF: tl.constexpr = 0x200000 if CODE == "e2m1" else 0x80000
        EXPONENT: tl.constexpr = 2 if CODE == "e2m1" else 8
        power = ((exact + (HALF if SCALE == "even" else 0)) & INFINITY_BITS) - (EXPONENT << 23)
        return tl.where(exact >= INFINITY_BITS, 0x7FC00000, power).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full(amax.shape, max_code(CODE), tl.float32))
    if SCALE != "float32":
        exact = scale.to(tl.int32, bitcast=True)
        up = (exact + 0x7FFFFF) & INFINITY_BITS
        scale = tl.where(exact >= INFINITY_BITS, 0x7FC00000, up).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def divisor_of(scale):
    """Return (scale, 1 / scale) for `divide_by`: an infinite scale makes every number 0."""
    infinite = magnitude_bits(scale) == INFINITY_BITS
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.where(infinite, scale if INTERPRET else 0.0, scale), inverse


@triton.jit
def divide_by(x, scale, inverse):
    """Compute x / scale, correctly rounded, in three operations.

    Markstein's correction: with the correctly rounded inverse, one step on the exact remainder rounds the quotient
    correctly. The interpreter has no fused multiply-add and divides.
    """
    if INTERPRET:
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    else:
        quotient = x * inverse
        remainder = tl.fma(-quotient, scale, x)
        corrected = tl.fma(remainder, tl.broadcast_to(inverse, x.shape), quotient)
        # no correction where the quotient is exact (it would lose the sign of zero) or has overflowed
        finite = magnitude_bits(quotient) < INFINITY_BITS
        return tl.where(finite & (remainder != 0.0), corrected, quotient)


@triton.jit
def store_scale(pointers, scale, mask, SCALE: tl.constexpr):
    """Store float32 scales, or the exponent bytes of powers of two."""
    if SCALE == "e8m0":
        tl.store(pointers, (magnitude_bits(scale) >> 23).to(tl.uint8), mask=mask)
    else:
        tl.store(pointers, scale, mask=mask)


@triton.jit
def encode(x, CODE: tl.constexpr, dtype: tl.constexpr):
    """Convert values, already divided by their scale, to codes, saturating.

    NaN stays NaN in e4m3 and is 0 in int8.
    """
    if CODE == "e4m3":
        return downcast_e4m3(clamp(x, 448.0))
    elif CODE == "int8":
        x = tl.maximum(tl.minimum(x, 127.0, propagate_nan=NAN), -128.0, propagate_nan=NAN)
        return tl.where(x == x, round_half_even(x), 0.0).to(tl.int8)
    else:
        return downcast(x, dtype)


@triton.jit
def row_places(layout, index, rows, HAS_COUNTS: tl.constexpr):
    """Return the offsets of x, bias, out and scales of rows `index`, and their validity.

    layout = (tokens per batch, strides of x, out and scales per batch and token, bias stride, experts of rows or None,
    number of bias rows, counts of valid rows or None).
    """
    tokens, x_b, x_t, out_b, out_t, scale_b, scale_t, bias_stride, experts, num_bias, counts = layout
    batch = (index // tokens).to(tl.int64)
    token = (index % tokens).to(tl.int64)
    valid = index < rows
    if HAS_COUNTS:
        valid = valid & (token < tl.load(counts + batch, mask=valid, other=0))
    expert = batch
    if experts is not None:
        expert = tl.load(experts + index, mask=valid, other=-1).to(tl.int64)
    has_bias = valid & (expert >= 0) & (expert < num_bias)
    bias = tl.where(has_bias, expert * bias_stride, -1)
    return (
        batch * x_b + token * x_t,
        bias,
        batch * out_b + token * out_t,
        batch * scale_b + token * scale_t,
        valid,
    )


@triton.jit
def load_values(
    x,
    bias,
    activation_args,
    place,
    bias_place,
    column,
    mask,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
):
    """Load x plus bias, through the activation, as float32 [R, C].

    `column` is [1 or R, C]; masked values are 0. activation_args = (output columns, column stride of x, alpha, beta,
    limit).
    """
    columns, stride, alpha, beta, limit = activation_args
    # the column stride is arbitrary
    first = tl.load(x + place + column.to(tl.int64) * stride, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        first += tl.load(bias + bias_place + column, mask=mask & (bias_place >= 0), other=0.0).to(tl.float32)
    if ACTIVATION == "":
        return first
    elif GATED:
        second = tl.load(x + place + (columns + column).to(tl.int64) * stride, mask=mask, other=0.0).to(tl.float32)
        if bias is not None:
            up_bias = tl.load(bias + bias_place + columns + column, mask=mask & (bias_place >= 0), other=0.0)
            second += up_bias.to(tl.float32)
        return activate_gated(first, second, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        return activate_plain(first, limit, ACTIVATION, HAS_LIMIT)


@triton.jit
def group_kernel(
    x,
    bias,
    layout,
    activation_args,
    out,
    scales,
    fixed,
    rows,
    stride_group,
    partials,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Process BLOCK groups of GROUP columns per program, counted row by row.

    The last group of a row may be short. CODE "" writes the values in out's dtype. Otherwise codes are written, with a
    scale per group or a shared one. SCALE "fixed" uses the scale `fixed`. SCALE "partials" derives the scale from the
    largest of the magnitudes `partials` [PARTIALS] (a power of two), and writes it to scales.
    """
    begin_pdl(PDL)
    columns = activation_args[0]
    groups = tl.cdiv(columns, GROUP)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    row = index // groups
    group = index % groups
    place, bias_place, out_place, scale_place, valid = row_places(layout, row, rows, HAS_COUNTS)
    column = group * GROUP + tl.arange(0, GROUP)[None, :]
    mask = valid & (column < columns)
    values = load_values(x, bias, activation_args, place, bias_place, column, mask, ACTIVATION, GATED, HAS_LIMIT)
    if CODE != "":
        if SCALE == "fixed":
            scale = tl.load(fixed + tl.zeros([1, 1], dtype=tl.int32)).to(tl.float32)
        elif SCALE == "partials":
            largest = tl.max(tl.load(partials + tl.arange(0, PARTIALS)[None, :]), axis=1, keep_dims=True)
            scale = scale_of(largest, CODE, "float32")
            zero = tl.zeros([1, 1], dtype=tl.int32)
            tl.store(scales + zero, scale, mask=zero + tl.program_id(0) == 0)
            values = tl.where(magnitude_bits(values) < INFINITY_BITS, values, float("nan"))
        else:
            scale = scale_of(tl.max(magnitude_bits(values), axis=1, keep_dims=True), CODE, SCALE)
            store_scale(scales + scale_place + group.to(tl.int64) * stride_group, scale, valid, SCALE)
        divisor, inverse = divisor_of(scale)
        values = divide_by(values, divisor, inverse)
    tl.store(out + out_place + column, encode(values, CODE, out.dtype.element_ty), mask=mask)


@triton.jit
def store_row(out, place, values, divisor, inverse, zero, column, mask, CODE: tl.constexpr, HAS_ZERO: tl.constexpr):
    """Store the codes of a row's values."""
    quotient = divide_by(values, divisor, inverse)
    if HAS_ZERO:
        quotient = round_half_even(quotient) + zero
    tl.store(out + place + column, encode(quotient, CODE, out.dtype.element_ty), mask=mask)


@triton.jit
def row_kernel(
    x,
    bias,
    layout,
    activation_args,
    out,
    scales,
    zero_points,
    rows,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    CODE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize one row per program with one scale.

    With `zero_points`, the codes are int8, for a range that includes 0. A row of one chunk stays in registers; a longer
    one is read twice.
    """
    begin_pdl(PDL)
    columns = activation_args[0]
    index = tl.program_id(0) + tl.zeros([1, 1], dtype=tl.int32)
    place, bias_place, out_place, scale_place, valid = row_places(layout, index, rows, HAS_COUNTS)
    column = tl.arange(0, BLOCK)[None, :]
    if CHUNKS == 1:
        mask = valid & (column < columns)
        values = load_values(x, bias, activation_args, place, bias_place, column, mask, ACTIVATION, GATED, HAS_LIMIT)
        largest = tl.max(magnitude_bits(values), axis=1, keep_dims=True)
        if zero_points is not None:
            low = tl.min(values, axis=1, keep_dims=True)
            high = tl.max(values, axis=1, keep_dims=True)
    else:
        largest = tl.zeros([1, 1], dtype=tl.int32)
        low = tl.zeros([1, 1], dtype=tl.float32)
        high = tl.zeros([1, 1], dtype=tl.float32)
        for chunk in range(CHUNKS):
            here = chunk * BLOCK + column
            mask = valid & (here < columns)
            values = load_values(x, bias, activation_args, place, bias_place, here, mask, ACTIVATION, GATED, HAS_LIMIT)
            largest = tl.maximum(largest, tl.max(magnitude_bits(values), axis=1, keep_dims=True))
            if zero_points is not None:
                low = tl.minimum(low, tl.min(values, axis=1, keep_dims=True))
                high = tl.maximum(high, tl.max(values, axis=1, keep_dims=True))
    if zero_points is not None:
        # scale = (high - low) / 255; a NaN or an infinity anywhere, or an overflow of the range, makes it NaN
        low = tl.minimum(low, 0.0)
        width = tl.maximum(high, 0.0) - low
        width = tl.where(width < AMAX_FLOOR, AMAX_FLOOR, width)
        scale = tl.div_rn(width, tl.full(width.shape, 255.0, tl.float32))
        scale = tl.where((largest < INFINITY_BITS) & (width < float("inf")), scale, float("nan"))
        divisor, inverse = divisor_of(scale)
        zero = -128.0 - divide_by(low, divisor, inverse)
        zero = tl.where(zero == zero, round_half_even(zero), 0.0)
        zero = tl.minimum(tl.maximum(zero, -128.0), 127.0)
        tl.store(zero_points + scale_place, zero.to(tl.int32), mask=valid)
    else:
        zero = 0.0
        scale = scale_of(largest, CODE, "float32")
        divisor, inverse = divisor_of(scale)
    tl.store(scales + scale_place, scale, mask=valid)
    if CHUNKS == 1:
        mask = valid & (column < columns)
        store_row(out, out_place, values, divisor, inverse, zero, column, mask, CODE, zero_points is not None)
    else:
        for chunk in range(CHUNKS):
            here = chunk * BLOCK + column
            mask = valid & (here < columns)
            values = load_values(x, bias, activation_args, place, bias_place, here, mask, ACTIVATION, GATED, HAS_LIMIT)
            store_row(out, out_place, values, divisor, inverse, zero, here, mask, CODE, zero_points is not None)


@triton.jit
def amax_kernel(
    x,
    bias,
    layout,
    activation_args,
    partials,
    rows,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the largest finite magnitude (as bits) of each program's tiles.

    A program processes STEPS tiles of BLOCK x GROUP values, num_programs apart.

    partials [programs]
    """
    begin_pdl(PDL)
    columns = activation_args[0]
    groups = tl.cdiv(columns, GROUP)
    largest = tl.zeros([BLOCK, GROUP], dtype=tl.int32)
    for step in range(STEPS):
        tile = tl.program_id(0) + step * tl.num_programs(0)
        index = tile * BLOCK + tl.arange(0, BLOCK)[:, None]
        row = index // groups
        place, bias_place, _, _, valid = row_places(layout, row, rows, HAS_COUNTS)
        column = (index % groups) * GROUP + tl.arange(0, GROUP)[None, :]
        mask = valid & (column < columns)
        values = load_values(x, bias, activation_args, place, bias_place, column, mask, ACTIVATION, GATED, HAS_LIMIT)
        largest = tl.maximum(largest, finite_bits(values))
    tl.store(partials + tl.program_id(0), tl.max(tl.max(largest, axis=1), axis=0))
