"""e2m1 weights dequantized in registers by plain Triton operations: tile loads and MMAs.

    weights          int32 words [E, rows, words], the checkpoint's bytes: 8 codes, low bits first
    scales           int32 [E, steps of 128 columns, rows]: the bytes of four groups, relative to the row's largest
    channel scales   float32 [E, rows]: the row's largest scale, which multiplies the final sums
    activations      bfloat16, float16 or float32; see `moe_core.kernels.gemm.as_stored`

Values and scales equal those of `moe_mxfp4.kernels.marlin_e2m1`, computed from codes in the checkpoint's order; float32
has the exponent range of bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from moe_core import QuantKey, kFp8Dynamic128Sym
from moe_core.api.kernels import (
    INTERPRET,
    LOAD_WORDS,
    SCALE_ACC_TOKENS,
    TileFunctions,
    activation_functions,
    in_order,
    multiply,
    of_group,
    open_groups,
    open_plain,
    scale_acc_channels,
    specialize,
    swap_ab_dot,
    tile_words,
    unpack,
)


@triton.jit
def _pair(words, factor, I: tl.constexpr, dtype: tl.constexpr):
    """Return [N, W, 2]: codes I and I + 4 of words [N, W], times `factor` [N, W]."""
    # shift distances of code 0's sign and of its three other bits
    SIGN: tl.constexpr = 12 - 4 * I
    REST: tl.constexpr = (9 if dtype == tl.float16 else 6) - 4 * I
    MASKS: tl.constexpr = 0x0E000E00 if dtype == tl.float16 else 0x01C001C0
    rest = words << REST if REST >= 0 else words >> -REST
    both = ((words << SIGN) & -0x7FFF8000) | (rest & MASKS)
    low = both.to(tl.int16).to(dtype, bitcast=True) * factor
    return tl.join(low, (both >> 16).to(tl.int16).to(dtype, bitcast=True) * factor)


@triton.jit
def dequantize_e2m1(words, scales, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """Dequantize words [N, W] to [N, COLUMNS] in the order of `arrange`.

    `scales` int32 [N] holds the bytes of four groups' scales.
    """
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    # a group is four words
    power = (scales[:, None] >> (tl.arange(0, W) // 4 * 8)[None, :]) & 255
    if INTERPRET or dtype == tl.float32:
        # Few operations, since each takes the interpreter a tenth of a millisecond.
        codes = unpack(words, 4)
        bits = ((codes & 8) << 28) | ((codes & 7) << 22)
        pairs = bits.to(tl.float32, bitcast=True) * (power << 23).to(tl.float32, bitcast=True)[:, :, None]
        if dtype == tl.float16:
            pairs = pairs.to(tl.float16).to(tl.float32)
    else:
        if dtype == tl.float16:
            factor = ((power << 23).to(tl.float32, bitcast=True) * 1.925929944387236e-34).to(tl.float16)
        else:
            factor = (power << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        even = tl.join(_pair(words, factor, 0, dtype), _pair(words, factor, 2, dtype))
        odd = tl.join(_pair(words, factor, 1, dtype), _pair(words, factor, 3, dtype))
        pairs = tl.join(even, odd)
    return in_order(pairs, N, W, 8)


@triton.jit
def load_short(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Load the words of a step of one group; its rows' scales are in the low bits."""
    scales = of_group(state[3], state, k // 4, EVEN_N) >> k % 4 * 8
    return tile_words(state, b_desc, k, K, BLOCK_K, 4, EVEN_N, EVEN_K), scales


@triton.jit
def scaled_mm_blockwise(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """Compute acc + (weights @ a.T) * scales of the step's activations."""
    tl.static_assert(SWAP_AB, "weights come from registers: SWAP_AB only")
    return acc + swap_ab_dot(dequantize_e2m1(b, b_scale, a.shape[1], a.dtype), a) * a_scale[None, :]


_MULTIPLY = specialize(multiply, dequantize=dequantize_e2m1)


def e2m1_functions(key: QuantKey | None, step: int) -> TileFunctions:
    """Build the tile functions for activations of ``key``, as `as_stored_scheme` stores them.

    Args:
        key: quantization of the activations.
        step: columns per mainloop step, one group or four.

    Returns:
        The device functions of a tile.
    """
    open_a, load_a = activation_functions(key)
    by_step = key == kFp8Dynamic128Sym
    scale_acc = scale_acc_channels
    if not (by_step or open_a is open_plain):
        scale_acc = SCALE_ACC_TOKENS[scale_acc]
    load_b, product = load_short if step == 32 else LOAD_WORDS[4, 0], scaled_mm_blockwise if by_step else _MULTIPLY
    return TileFunctions(open_a, load_a, open_groups, load_b, product, scale_acc)
