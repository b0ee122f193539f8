"""Launch of the kernel of `moe_core.kernels.gemm.sm90.mixed_input`."""

from __future__ import annotations

import math
from typing import Any

import triton.language as tl

from moe_core.kernels.gemm.fragments.fragment_order import STEP, WORDS
from moe_core.kernels.gemm.sm90.launch import descriptor, specialized, start
from moe_core.kernels.gemm.tiles.launch import Gemm, constant, lines_of_experts

#: Weight rows of a tile, which are requested together.
WORDS_BOX = 256
#: Shared memory for operands, in bytes. The remainder is for their scales and the epilogue's layout conversion.
RING = 196608
#: Tile heights, keyed by the height of the schedule's tiles; a tile uses the smallest that holds its rows.
HEIGHTS = {128: (128, 96, 64), 64: (64, 48, 32)}
#: Heights of the schedule's tiles.
ROWS = tuple(HEIGHTS)


def words_gemm(gemm: Gemm) -> None:
    """Run a GEMM of 4-bit words [E, steps, rows, words of a step] and a 16-bit operand A.

    See `hopper_gemm` for the result. ``gemm.a.warp_specialized`` is () if A is sorted. For rows by token it is
    (top-k,), and rows are read in whole 32 bytes. ``weight_scales`` holds `b_args` of the tile kernel's device
    functions, and ``groups`` of `WordFunctions`; ``functions`` returns its ``dequantize``.

    Args:
        gemm: The GEMM.

    Raises:
        TypeError: The weight has no warp-specialized kernel.
    """
    from moe_core.kernels.gemm.sm90.mixed_input import WordsForm, words_kernel

    special, height = specialized(gemm), gemm.order.block_m
    arguments, groups = special.weight_scales
    heights = HEIGHTS[height]
    per_token, values = gemm.a.warp_specialized, gemm.a.arguments[0]
    x: Any = (values[: gemm.routing.num_pairs], values.stride(0), *(per_token or ()))
    if not per_token:
        box = [math.gcd(*heights), STEP // 2]
        x = descriptor(values[: gemm.routing.num_pairs, : gemm.weight.k], box, 128)
    form = WordsForm(
        constant(heights),
        constant(groups),
        tl.constexpr(gemm.weight.interleaved),
        tl.constexpr(bool(per_token)),
        constant(gemm.config.group_m),
        special.functions(),
    )
    words, rows = lines_of_experts(special.tensor), special.tensor.shape[2]
    box = [WORDS_BOX * WORDS // words.shape[1], words.shape[1]]
    operands = x, descriptor(words, box, 4 * words.shape[1])
    stages = RING // (WORDS_BOX * WORDS * 4 + height * STEP * 2)
    start(words_kernel, gemm, -(-rows // WORDS_BOX), operands, (arguments,), rows, form, stages)
