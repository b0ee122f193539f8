"""4- and 8-bit codes: of a symmetric type (code - 8, code - 128), or with zero points."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from moe_core.kernels.device.casts import INTERPRET
from moe_core.kernels.device.specialize import specialize
from moe_core.kernels.gemm.fragments import operand
from moe_core.kernels.gemm.fragments.dequant import (
    in_columns,
    int4_64ths,
    integer_values,
    integers,
    pair,
    unshifted_int4,
    unshifted_zeros,
    zero_offset,
)
from moe_core.kernels.gemm.fragments.operand import LOAD_WORDS, per_word, scale_of, zero_of
from moe_core.kernels.gemm.marlin.gemv import GemvFunctions
from moe_core.kernels.gemm.marlin.weight import MarlinMatrix, WordFunctions
from moe_core.kernels.gemm.plan import TileConfig
from moe_core.kernels.gemm.tiles.swap_ab import FEW

# Whether values are multiplied by their groups' scales; set by `specialize`.
SCALED = tl.constexpr(False)


@triton.jit
def int4_bytes(words, dtype: tl.constexpr):
    """The codes of words for `moe_core.kernels.gemm.fragments.integer_dot`."""
    return words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F


@triton.jit
def int8_bytes(words, dtype: tl.constexpr):
    """`int4_bytes` for 8-bit codes."""
    return (words,)


@triton.jit
def dequantize_integers(words, scales, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """Codes minus zero points; scales [N].

    SCALED: times scales [N, groups], rounded.
    """
    W: tl.constexpr = words.shape[1]
    BITS: tl.constexpr = 32 * W // COLUMNS
    offset = None
    scale = None
    # Scales of rows are those of one group.
    groups = scales if SCALED else scales[:, None]
    if SCALED:
        scale = per_word(pair(scale_of(groups), dtype), W, W // 16)
    if scales.dtype == tl.int32:
        offset = per_word(zero_offset(zero_of(groups), BITS, dtype), W, W // 16)
    return integers(words, offset, scale, BITS, dtype)


@triton.jit
def dequantize_int4(words, scales, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """Symmetric codes minus 8; for bfloat16 divided by 64, see `int4_factor`."""
    if INTERPRET or dtype != tl.bfloat16:
        return integers(words, None, None, 4, dtype)
    else:
        return in_columns(int4_64ths(words))


@triton.jit
def int4_factor(scales, dtype: tl.constexpr):
    """`moe_core.kernels.gemm.fragments.operand.factor_of` for `dequantize_int4`.

    Scales must be below 2^122.
    """
    return scales if INTERPRET or dtype != tl.bfloat16 else scales * 64.0


@triton.jit
def quarter_integers(words, scales, U: tl.constexpr, dtype: tl.constexpr):
    """Codes minus zero points.

    SCALED: times the scale of their group, rounded. Otherwise the row's scale multiplies the sums.
    """
    found = scales[U * len(scales) // 4]
    if SCALED and found.dtype == tl.int32 and dtype == tl.bfloat16:
        return unshifted_zeros(words, zero_of(found)[:, None], scale_of(found)[:, None])
    offset = None
    scale = None
    if SCALED:
        scale = pair(scale_of(found), dtype)[:, None]
    if found.dtype == tl.int32:
        offset = zero_offset(zero_of(found), 4, dtype)[:, None]
    return integer_values(words, offset, scale, 4, dtype)


@triton.jit
def quarter_unshifted(words, scales, U: tl.constexpr, dtype: tl.constexpr):
    """`quarter_integers` for symmetric codes in bfloat16, relative to `WordFunctions.powers`."""
    return unshifted_int4(words, scales[U * len(scales) // 4][:, None])


_QUARTERS = {scaled: specialize(quarter_integers, SCALED=scaled) for scaled in (False, True)}
_MULTIPLY = specialize(operand.multiply, dequantize=dequantize_integers)
_MULTIPLY_GROUP = specialize(operand.multiply_group, dequantize=dequantize_integers, SCALES_AHEAD=True)
_MULTIPLY_INT4 = specialize(
    operand.multiply_group, dequantize=dequantize_int4, factor_of=int4_factor, SCALES_AHEAD=True
)
_MULTIPLY_SCALED = specialize(operand.multiply, dequantize=specialize(dequantize_integers, SCALED=True))


def integer_functions(matrix: MarlinMatrix, config: TileConfig) -> tuple[Any, Any, Any, Any]:
    """Return the tile kernel's functions for a tile of integer words.

    Args:
        matrix: The weight.
        config: Launch configuration.

    Returns:
        (open_b, load_b, multiply, scale_acc).
    """
    bits, size = matrix.bits, matrix.group_size
    if size == -1:
        return operand.open_rows, LOAD_WORDS[bits, -1], _MULTIPLY, operand.scale_acc_rows
    scale_acc = None if matrix.channel_scales is None else operand.scale_acc_channels
    open_b = operand.open_pairs if matrix.paired else operand.open_groups
    if size == operand.STEP.value and config.block_m <= FEW.value and not config.uniform:
        # Each step's partial sum is scaled separately. Above FEW rows, its sums need too many registers.
        symmetric = bits == 4 and matrix.scales.dtype != torch.int32
        return open_b, LOAD_WORDS[bits, 0], _MULTIPLY_INT4 if symmetric else _MULTIPLY_GROUP, scale_acc
    return open_b, LOAD_WORDS[bits, operand.STEP.value // size], _MULTIPLY_SCALED, scale_acc


def integer_words(matrix: MarlinMatrix) -> WordFunctions | None:
    """Return the functions of the warp-specialized kernel, which multiplies 4-bit words.

    Args:
        matrix: The weight.

    Returns:
        The functions, or None for 8-bit codes.
    """
    if matrix.bits != 4:
        return None
    groups = 0 if matrix.group_size == -1 else operand.STEP.value // matrix.group_size
    if matrix.powers is not None:
        return WordFunctions(groups, lambda: quarter_unshifted, matrix.powers)
    return WordFunctions(groups, lambda: _QUARTERS[groups != 0])


def integer_gemv(matrix: MarlinMatrix) -> GemvFunctions:
    """Return the GEMV functions of integer words.

    Args:
        matrix: The weight.

    Returns:
        The functions.
    """
    scales = "zero" if matrix.scales.dtype == torch.int32 else "row" if matrix.group_size == -1 else "group"
    return GemvFunctions(int4_bytes, scales, 8) if matrix.bits == 4 else GemvFunctions(int8_bytes, scales, 128)
