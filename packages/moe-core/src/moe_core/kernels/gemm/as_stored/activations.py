"""Conversion of x and h into operands: `quantize` functions of the grouped GEMM.

`quant_args` starts with the destination tensor. Only `code_mxfp8` produces codes of e4m3. The other functions round
values in float32 to those that e4m3 or e2m1 can represent, which needs no hardware support for either. They store
bfloat16, which represents e4m3 and e2m1 times a power of two exactly.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl

from moe_core.errors import ConfigError
from moe_core.kernels.device.casts import clamp, downcast, downcast_e4m3, round_e2m1, round_e4m3
from moe_core.kernels.device.specialize import specialize
from moe_core.kernels.gemm.as_stored.tiles import arrange
from moe_core.kernels.gemm.tiles.scaled_mm import quantize_row, quantize_static
from moe_core.kernels.ops._quantize_kernels import magnitude_bits, scale_of
from moe_core.spec.quant_key import (
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp4Dynamic,
    kMxfp8Dynamic,
)

# Columns that share a scale of MXFP8 and MXFP4.
MX_GROUP = tl.constexpr(32)
# Set by `specialize`: element type and scale rounding of MXFP8 and MXFP4.
CODE = tl.constexpr("e4m3")
ROUNDING = tl.constexpr("up")


@triton.jit
def values_as_they_are(tile, quant_args, expert, AXIS: tl.constexpr):
    """Convert to the dtype of the destination."""
    return downcast(tile, quant_args[0].dtype.element_ty), 0.0


@triton.jit
def _scaled_mx(tile, CODE: tl.constexpr, AXIS: tl.constexpr, ROUNDING: tl.constexpr):
    """(values divided by their scales, scales), float32, in groups of MX_GROUP columns.

    Scales are powers of two. Both results have the columns split: [ROWS, groups, columns of one] for AXIS 1, [groups,
    columns of one, ROWS] for AXIS 0.
    """
    GROUPS: tl.constexpr = tile.shape[AXIS] // MX_GROUP
    groups = tile.reshape(tile.shape[:AXIS] + [GROUPS, MX_GROUP] + tile.shape[AXIS + 1 :])
    bits = tl.max(magnitude_bits(groups), axis=AXIS + 1, keep_dims=True)
    scale = scale_of(bits, CODE, ROUNDING)
    # The inverse of a power of two is 254 - exponent. For NaN any value will do, because products contain the
    # scale's NaN.
    return groups * (0x7F000000 - magnitude_bits(scale)).to(tl.float32, bitcast=True), scale


@triton.jit
def round_mx(tile, quant_args, expert, AXIS: tl.constexpr):
    """Round groups of MX_GROUP columns to codes of a scale and multiply them by it again."""
    scaled, scale = _scaled_mx(tile, CODE, AXIS, ROUNDING)
    if ROUNDING != "up":
        # Values may exceed the largest code where scales are not rounded up.
        scaled = clamp(scaled, 448.0 if CODE == "e4m3" else 6.0)
    rounded = round_e4m3(scaled) if CODE == "e4m3" else round_e2m1(scaled)
    return downcast((rounded * scale).reshape(tile.shape), tl.bfloat16), 0.0


@triton.jit
def code_mxfp8(tile, quant_args, expert, AXIS: tl.constexpr):
    """e4m3 codes in their original order, and the bytes of scales of MX_GROUP columns."""
    GROUPS: tl.constexpr = tile.shape[AXIS] // MX_GROUP
    scaled, scale = _scaled_mx(tile, "e4m3", AXIS, "up")
    exponents = (magnitude_bits(scale) >> 23).to(tl.uint8)
    KEPT: tl.constexpr = [GROUPS] if GROUPS > 1 else []
    exponents = exponents.reshape(tile.shape[:AXIS] + KEPT + tile.shape[AXIS + 1 :])
    return downcast_e4m3(scaled).reshape(tile.shape), exponents


# Set by `specialize`: codes per weight word (0 keeps the column order), and the function that produces values.
CODES = tl.constexpr(8)
quantize: Any = values_as_they_are


@triton.jit
def arranged(tile, quant_args, expert, AXIS: tl.constexpr):
    """The result of `quantize`, with its columns in the order of the weights."""
    values, scale = quantize(tile, quant_args, expert, AXIS)
    return arrange(values, CODES, AXIS), scale


@cache
def quantizer(key: QuantKey | None, bits: int | None) -> Any:
    """Return the `quantize` function of an activation key.

    Args:
        key: Quantization key of the activations; None for 16-bit activations.
        bits: Bits per code of the weights; None keeps the column order.

    Returns:
        The device function.

    Raises:
        ConfigError: The key is not supported.
    """
    if key is None:
        made: Any = values_as_they_are
    elif key in (kFp8DynamicTokenSym, kFp8Dynamic128Sym):
        made = quantize_row
    elif key == kFp8StaticTensorSym:
        made = quantize_static
    elif key.with_rounding("up") in (kMxfp8Dynamic, kMxfp4Dynamic):
        made = specialize(round_mx, CODE=key.dtype.name, ROUNDING=key.scale.rounding)
    else:
        raise ConfigError(
            f"activation_key {key} is not supported; expected None (16-bit), e4m3 per token, per 128 columns "
            "or static, MXFP8 or MXFP4"
        )
    return specialize(arranged, CODES=0 if bits is None else 32 // bits, quantize=made)
