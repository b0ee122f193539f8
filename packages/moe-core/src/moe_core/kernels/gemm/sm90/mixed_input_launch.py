"""Start the kernel of `moe_core.kernels.gemm.sm90.mixed_input`."""

from __future__ import annotations

import math
from typing import Any

import triton.language as tl

from moe_core.kernels.gemm.fragments.fragment_order import STEP, WORDS
from moe_core.kernels.gemm.sm90.launch import descriptor, specialised, start
from moe_core.kernels.gemm.tiles.launch import Gemm, constant, lines_of_experts

#: rows of weights of a tile, which are requested together
WORDS_BOX = 256
#: shared memory for operands: what is left is room for their scales, and for the epilogue's change of layout
RING = 196608
#: heights that tiles take, by the rows that the schedule's have: what an expert's last rows need
HEIGHTS = {128: (128, 96, 64), 64: (64, 48, 32)}
#: rows of the schedule's tiles
ROWS = tuple(HEIGHTS)


def words_gemm(gemm: Gemm) -> None:
    """As `hopper_gemm`, for 4-bit words [E, steps, rows, words of a step] and operand A of 16 bits.

    ``gemm.a.warp_specialised`` is () where A is sorted; of tokens, (top-k,), and rows are read in whole 32 bytes.
    ``weight_scales``: `b_args` of the tile kernel's device functions, and the groups of `WordFunctions`, whose
    ``dequantize`` is what ``functions`` give.
    """
    from moe_core.kernels.gemm.sm90.mixed_input import WordsForm, words_kernel

    special, height = specialised(gemm), gemm.order.block_m
    arguments, groups = special.weight_scales
    heights = HEIGHTS[height]
    per_token, values = gemm.a.warp_specialised, gemm.a.arguments[0]
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
