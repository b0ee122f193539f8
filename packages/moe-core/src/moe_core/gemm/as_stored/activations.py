"""How x and h become what is multiplied: `quantize` functions of the grouped GEMM, one for each kind.

Q starts with the tensor that values go to, whose type they get.  But for `code_mxfp8` codes of e4m3 and e2m1 are not
made: the numbers are rounded to what those hold, in float32, which needs no hardware for either.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.as_stored.tiles import arrange
from moe_core.gemm.scaled_mm import largest, scale_of
from moe_core.jit.casts import divide, divide_all, narrow, narrow_e4m3, round_e2m1, round_e4m3
from moe_core.ops._quantize_kernels import magnitude_bits
from moe_core.ops._quantize_kernels import scale_of as group_scale_of

E4M3_MAX = tl.constexpr(448.0)
E2M1_MAX = tl.constexpr(6.0)
# columns that share a scale of MXFP8 and MXFP4
MX_GROUP = tl.constexpr(32)


@triton.jit
def arrange_4(tile, quant_args, expert, AXIS: tl.constexpr):
    """Values as they are, beside codes of 4 bits."""
    return arrange(narrow(tile, quant_args[0].dtype.element_ty), 8, AXIS), 0.0


@triton.jit
def arrange_8(tile, quant_args, expert, AXIS: tl.constexpr):
    """As `arrange_4`, beside codes of 8 bits."""
    return arrange(narrow(tile, quant_args[0].dtype.element_ty), 4, AXIS), 0.0


@triton.jit
def round_4(tile, quant_args, expert, AXIS: tl.constexpr):
    """All columns of the tile as e4m3 numbers and one float32 scale, amax / 448."""
    scale = scale_of(largest(tile, AXIS), E4M3_MAX)
    rounded = round_e4m3(divide(tile, tl.expand_dims(scale, AXIS)))
    return arrange(narrow(rounded, tl.bfloat16), 8, AXIS), scale


@triton.jit
def round_static_4(tile, quant_args, expert, AXIS: tl.constexpr):
    """e4m3 numbers for the expert's scale, saturating; quant_args = (where they go, float32 scales of experts)."""
    quotient = divide_all(tile, tl.load(quant_args[1] + expert))
    quotient = tl.minimum(quotient, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    quotient = tl.maximum(quotient, -E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return arrange(narrow(round_e4m3(quotient), tl.bfloat16), 8, AXIS), 0.0


@triton.jit
def _scaled_mx(tile, CODE: tl.constexpr, AXIS: tl.constexpr, SCALE: tl.constexpr):
    """(values divided by their scales, scales), float32, of MX_GROUP columns each; scales are powers of two.

    Both have the columns split: [ROWS, groups, columns of one] for AXIS 1, [groups, columns of one, ROWS] for AXIS 0.
    """
    ROWS: tl.constexpr = tile.shape[1 - AXIS]
    GROUPS: tl.constexpr = tile.shape[AXIS] // MX_GROUP
    if AXIS == 1:
        groups = tile.reshape(ROWS, GROUPS, MX_GROUP)
    else:
        groups = tile.reshape(GROUPS, MX_GROUP, ROWS)
    bits = tl.max(magnitude_bits(groups), axis=2 if AXIS == 1 else 1, keep_dims=True)
    scale = group_scale_of(bits, CODE, SCALE)
    # the inverse of a power of two: 254 - exponent; that of NaN is as good as any, products have the scale's NaN
    return groups * (0x7F000000 - magnitude_bits(scale)).to(tl.float32, bitcast=True), scale


@triton.jit
def _round_mx(tile, CODE: tl.constexpr, AXIS: tl.constexpr, SCALE: tl.constexpr):
    """float32: MX_GROUP columns each rounded to codes of a scale and multiplied by it again."""
    scaled, scale = _scaled_mx(tile, CODE, AXIS, SCALE)
    if SCALE != "e8m0":
        # more than the largest code is possible where scales are not rounded up
        MOST: tl.constexpr = E4M3_MAX if CODE == "e4m3" else E2M1_MAX
        scaled = tl.minimum(scaled, MOST, propagate_nan=tl.PropagateNan.ALL)
        scaled = tl.maximum(scaled, -MOST, propagate_nan=tl.PropagateNan.ALL)
    rounded = round_e4m3(scaled) if CODE == "e4m3" else round_e2m1(scaled)
    return (rounded * scale).reshape(tile.shape)


@triton.jit
def code_mxfp8(tile, quant_args, expert, AXIS: tl.constexpr):
    """e4m3 codes in their own order, and the bytes of scales of MX_GROUP columns."""
    ROWS: tl.constexpr = tile.shape[1 - AXIS]
    GROUPS: tl.constexpr = tile.shape[AXIS] // MX_GROUP
    scaled, scale = _scaled_mx(tile, "e4m3", AXIS, "e8m0")
    exponents = (magnitude_bits(scale) >> 23).to(tl.uint8)
    codes = narrow_e4m3(scaled).reshape(tile.shape)
    if GROUPS == 1:
        return codes, exponents.reshape(ROWS)
    elif AXIS == 1:
        return codes, exponents.reshape(ROWS, GROUPS)
    else:
        return codes, exponents.reshape(GROUPS, ROWS)


@triton.jit
def round_mxfp8(tile, quant_args, expert, AXIS: tl.constexpr):
    """Rounded to MXFP8 and back, columns in their own order: bfloat16, which holds e4m3 times a power of two."""
    return narrow(_round_mx(tile, "e4m3", AXIS, "e8m0"), tl.bfloat16), 0.0


@triton.jit
def round_mxfp8_even(tile, quant_args, expert, AXIS: tl.constexpr):
    """As `round_mxfp8`, scales rounded "even"."""
    return narrow(_round_mx(tile, "e4m3", AXIS, "even"), tl.bfloat16), 0.0


@triton.jit
def round_mxfp8_down(tile, quant_args, expert, AXIS: tl.constexpr):
    """As `round_mxfp8`, scales rounded "down"."""
    return narrow(_round_mx(tile, "e4m3", AXIS, "down"), tl.bfloat16), 0.0


@triton.jit
def round_mxfp8_4(tile, quant_args, expert, AXIS: tl.constexpr):
    """Rounded to MXFP8 and back: e4m3 numbers times powers of two."""
    return arrange(narrow(_round_mx(tile, "e4m3", AXIS, "e8m0"), tl.bfloat16), 8, AXIS), 0.0


@triton.jit
def round_mxfp8_even_4(tile, quant_args, expert, AXIS: tl.constexpr):
    """As `round_mxfp8_4`, scales rounded "even"."""
    return arrange(narrow(_round_mx(tile, "e4m3", AXIS, "even"), tl.bfloat16), 8, AXIS), 0.0


@triton.jit
def round_mxfp8_down_4(tile, quant_args, expert, AXIS: tl.constexpr):
    """As `round_mxfp8_4`, scales rounded "down"."""
    return arrange(narrow(_round_mx(tile, "e4m3", AXIS, "down"), tl.bfloat16), 8, AXIS), 0.0


@triton.jit
def round_mxfp4_4(tile, quant_args, expert, AXIS: tl.constexpr):
    """Rounded to MXFP4 and back: e2m1 numbers times powers of two."""
    return arrange(narrow(_round_mx(tile, "e2m1", AXIS, "e8m0"), tl.bfloat16), 8, AXIS), 0.0


@triton.jit
def round_mxfp4_even_4(tile, quant_args, expert, AXIS: tl.constexpr):
    """As `round_mxfp4_4`, scales rounded "even"."""
    return arrange(narrow(_round_mx(tile, "e2m1", AXIS, "even"), tl.bfloat16), 8, AXIS), 0.0


@triton.jit
def round_mxfp4_down_4(tile, quant_args, expert, AXIS: tl.constexpr):
    """As `round_mxfp4_4`, scales rounded "down"."""
    return arrange(narrow(_round_mx(tile, "e2m1", AXIS, "down"), tl.bfloat16), 8, AXIS), 0.0
