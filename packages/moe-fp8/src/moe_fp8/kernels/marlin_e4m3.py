"""e4m3 functions for `moe_core.kernels.gemm.marlin`: 8-bit codes dequantized in registers.

An e4m3 byte shifted into the exponent position of a 16-bit float equals the number times 2^-120 (bfloat16) or 2^-8
(float16), subnormals included. One multiplication restores the value exactly and applies a scale at the same time.
Scales are

    per row       float32 [E, 1, rows], applied to the final accumulator
    per block     float32 [E, tiles of 128 rows, 2 * groups of 128 or 64 columns]: a pair for each group, of 64 rows
                  each: gate and up if these are interleaved, else the two halves of the tile
    MXFP8         int32 [E, steps of 128 columns, rows], the bytes of a step's four groups: 247 + exponent

The last two are relative to the largest scale of a row, which multiplies the row's accumulator
(`MarlinMatrix.channel_scales`). A relative MXFP8 scale of 1 is the byte 247, the exponent byte of a bfloat16 number
2^120 times as large; float16 loses only values below 2^-23 of a row's largest group. NaN codes (0x7f, 0xff) become
480: checkpoints are checked for them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from moe_core.api.experts import TileConfig
from moe_core.api.kernels import (
    FEW,
    INTERPRET,
    LOAD_WORDS,
    STEP,
    GemvFunctions,
    MarlinMatrix,
    asm_values,
    in_columns,
    multiply,
    multiply_group,
    open_groups,
    open_rows,
    pair,
    per_word,
    scale_acc_channels,
    scale_acc_rows,
    specialize,
    step_e8m0,
    tile_words,
)

# byte of a row's largest MXFP8 scale, as `convert_e4m3` writes it
LARGEST = tl.constexpr(247)
# rows of packed words that share a pair of block scales
PAIR_ROWS = tl.constexpr(128)
# whether gate and up rows are interleaved; set by `specialize`
INTERLEAVED = tl.constexpr(False)


@triton.constexpr_function
def _widening(float16: bool, scaled: bool) -> str:
    """Return PTX that writes bytes 0 and 2 of $4 to $0, $1 and bytes 1 and 3 to $2, $3.

    Multiplies by the pair $5 if ``scaled``. The addend -0.0 preserves the sign of zeros.
    """
    kind, up, left, shift, mask = (
        ("f16x2", "0x5c005c00", 7, 1, "0x3f803f80") if float16 else ("bf16x2", "0x7b807b80", 4, 4, "0x07f007f0")
    )
    return f"""
    {{
        .reg .b32 low, high, up, sign;
        mov.b32 sign, 0x80008000;
        mov.b32 up, {"$5" if scaled else up};
        shl.b32 low, $4, {left};
        and.b32 low, low, {mask};
        shl.b32 high, $4, 8;
        lop3.b32 low, high, sign, low, 0xea;
        shr.u32 high, $4, {shift};
        and.b32 high, high, {mask};
        lop3.b32 high, $4, sign, high, 0xea;
        fma.rn.{kind} low, low, up, sign;
        fma.rn.{kind} high, high, up, sign;
        mov.b32 {{$0, $1}}, low;
        mov.b32 {{$2, $3}}, high;
    }}
    """


@triton.jit
def _byte(words, scale):
    """Dequantize the lowest byte of each of `words` to float32, like the inline assembly."""
    bits = ((words & 0x80) << 24) | ((words & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return value if scale is None else value * scale


@triton.jit
def e4m3_values(words, dtype: tl.constexpr, scale=None):
    """Dequantize the four numbers of each of `words` [N, W], as `asm_values` returns them.

    See `moe_core.kernels.gemm.fragments.dequant.asm_values`; float32 in the interpreter. With `scale` [N, W] the
    products are rounded. `scale` holds pairs of `dtype`, premultiplied by 2^120 (float16: 2^8); for float32 and in the
    interpreter it is the plain scale.
    """
    if INTERPRET or dtype == tl.float32:
        return _byte(words, scale), _byte(words >> 16, scale), _byte(words >> 8, scale), _byte(words >> 24, scale)
    else:
        asm: tl.constexpr = _widening(dtype == tl.float16, scale is not None)
        if scale is None:
            return asm_values(asm, 4, "r", (words,), dtype)
        else:
            return asm_values(asm, 4, "r,r", (words, scale), dtype)


@triton.jit
def e4m3(words, scales, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """Dequantize `words` [N, W] to [N, COLUMNS], without scales."""
    return in_columns(e4m3_values(words, dtype))


@triton.jit
def e4m3_scaled(words, scales, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """Dequantize like `e4m3` and multiply by the float32 scales [N, groups], rounded."""
    if INTERPRET or dtype == tl.float32:
        scale = scales
    elif dtype == tl.float16:
        scale = pair(scales * 256.0, dtype)
    else:
        scale = pair(scales * 1.329227995784916e36, dtype)
    return in_columns(e4m3_values(words, dtype, per_word(scale, words.shape[1], 2)))


@triton.jit
def mxfp8(words, scales, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """Dequantize with a step's int32 scales [N]; exact in bfloat16 and float32."""
    return in_columns(e4m3_values(words, dtype, per_word(step_e8m0(scales, LARGEST, dtype), words.shape[1], 2)))


@triton.jit
def _second(start, BLOCK_N: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return [BLOCK_N] flags: 1 for rows that use the second scale of a pair.

    `start` is the tile's offset within the rows that share the pair.
    """
    # gate and up rows are interleaved in blocks of 8
    return (start + tl.arange(0, BLOCK_N)) // (8 if INTERLEAVED else PAIR_ROWS // 2) % 2


@triton.jit
def open_blocks(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """Block-scale variant of `open_groups`, which also returns pointers to scale pairs."""
    rows, inside, first, _, scale_t, tiles, factor = open_groups(b_args, expert, half, n, N, BLOCK_N)
    scales = b_args.scales + expert.to(tl.int64) * b_args.scale_e
    start = n % PAIR_ROWS if BLOCK_N < PAIR_ROWS else 0
    pair = scales + n // PAIR_ROWS * scale_t
    # a tile of 256 rows spans two pairs of scales; if the last tile has only one, it is read twice
    after = scales + tl.minimum(n // PAIR_ROWS + 1, tiles - 1) * scale_t
    row = n + tl.arange(0, BLOCK_N)
    scale = scales + row // PAIR_ROWS * scale_t + _second(start, BLOCK_N, INTERLEAVED)
    return rows, inside, first, scale, 2, scale_t // 2, factor, pair, after, start


@triton.jit
def load_block(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Load the words of a step of one group, and the block scales [BLOCK_N].

    The scales are built from scalars: a vector would pass through shared memory and occupy registers.
    """
    BLOCK_N: tl.constexpr = state[1].shape[0]
    first = _second(state[9], BLOCK_N, INTERLEAVED) == 0
    scale = tl.where(first, tl.load(state[7] + 2 * k), tl.load(state[7] + 2 * k + 1))
    if BLOCK_N > PAIR_ROWS:
        tl.static_assert(BLOCK_N == 2 * PAIR_ROWS, "a tile has one pair of scales or two")
        after = tl.where(first, tl.load(state[8] + 2 * k), tl.load(state[8] + 2 * k + 1))
        scale = tl.where(tl.arange(0, BLOCK_N) < PAIR_ROWS, scale, after)
    return tile_words(state, b_desc, k, K, BLOCK_K, 8, EVEN_N), scale


#: open_b and load_b for block scales, keyed by whether rows are interleaved
_BLOCKS = {
    interleaved: (specialize(open_blocks, INTERLEAVED=interleaved), specialize(load_block, INTERLEAVED=interleaved))
    for interleaved in (False, True)
}
_MULTIPLY = specialize(multiply, dequantize=e4m3)
_MULTIPLY_GROUP = specialize(multiply_group, dequantize=e4m3)
_MULTIPLY_SCALED = specialize(multiply, dequantize=e4m3_scaled)
_MULTIPLY_MXFP8 = specialize(multiply, dequantize=mxfp8)


def e4m3_functions(matrix: MarlinMatrix, config: TileConfig) -> tuple[Any, Any, Any, Any]:
    """Choose (open_b, load_b, multiply, scale_acc) by scale type.

    Args:
        matrix: converted weights; group sizes are -1 (per row), 128, 64 and 32 (MXFP8).
        config: tile configuration of the launch.

    Returns:
        The four device functions.
    """
    size = matrix.group_size
    if size == -1:
        return open_rows, LOAD_WORDS[8, -1], _MULTIPLY, scale_acc_rows
    if size == 32:
        return open_groups, LOAD_WORDS[8, 0], _MULTIPLY_MXFP8, scale_acc_channels
    opened, load = _BLOCKS[matrix.interleaved]
    if size == STEP and config.block_m <= FEW.value and not config.uniform:
        # Each step's partial sum is scaled separately; for more rows the partial sums need too many registers.
        return opened, load, _MULTIPLY_GROUP, scale_acc_channels
    return opened, LOAD_WORDS[8, STEP // size], _MULTIPLY_SCALED, scale_acc_channels


def e4m3_gemv(matrix: MarlinMatrix) -> GemvFunctions | None:
    """Return the single-token functions, or None where scales change along a row.

    Tiles of the latter were measured to be faster.

    Args:
        matrix: converted weights.
    """
    return GemvFunctions(e4m3_values, "row") if matrix.group_size == -1 else None
