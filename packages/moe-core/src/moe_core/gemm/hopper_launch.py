"""Start the warp-specialised kernels of sm_90, `moe_core.gemm.hopper` and `moe_core.gemm.marlin.hopper`."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from moe_core.gemm.launch import Gemm, WarpSpecialisedGemm, constant, schedule_of
from moe_core.jit.launch import launch

#: 8 bits: rows and columns of a tile of one operand, and of a weight block
TILE = 128
#: steps in flight, of 128 columns: 48 KB each, and room for the epilogue's change of layout
STAGES = 4
#: 4-bit words: rows of weights of a tile, columns of a step, and words that these are
WORDS_TILE = 256
STEP = 128
WORDS = 16
#: shared memory for operands: what is left is room for the epilogue's change of layout
RING = 196608
#: heights that tiles take, by the rows that the schedule's have: what an expert's last rows need
HEIGHTS = {128: (128, 96, 64), 64: (64, 48, 32)}


def _descriptor(matrix: Tensor, block: list[int], swizzle: int) -> Any:
    """Tensor descriptor of a contiguous-column matrix, or of experts' [E, rows, columns], rows one after the other."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if matrix.dim() == 3:
        experts, rows, columns = matrix.shape
        matrix = torch.as_strided(matrix, (experts * rows, columns), (matrix.stride(1), 1))
    bits = 8 * matrix.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
    return TensorDescriptor.from_tensor(matrix, block, layout)


def _special(gemm: Gemm) -> WarpSpecialisedGemm:
    if gemm.weight.warp_specialised is None:
        raise TypeError("the weight has no warp-specialised kernel")
    return gemm.weight.warp_specialised


def _start(
    kernel: Any, gemm: Gemm, blocks: int, operands: tuple[Any, ...], scales: tuple[Any, ...], form: Any, stages: int
) -> None:
    """A program for each multiprocessor, at most one for each tile of ``blocks`` column blocks."""
    device, weight = gemm.out.values.device, gemm.weight
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    launch(
        kernel,
        (min(num_sms, gemm.routing.max_tiles(gemm.order.block_m) * blocks),),
        *operands,
        schedule_of(gemm.order),
        *scales,
        gemm.out.kernel_arguments(),
        gemm.epilogue,
        weight.n,
        weight.k,
        _special(gemm).tensor.shape[1],
        form,
        STAGES=stages,
        pdl=gemm.pdl,
        num_warps=4,
    )


def hopper_gemm(gemm: Gemm) -> None:
    """One GEMM of operand A [P, K] by sorted row and a weight, of one type of one byte.

    ``multiply`` of the weight (see `moe_core.gemm.hopper`) gets the rows' ``gemm.a.warp_specialised`` and its scales.
    With an activation the result has sorted rows; without, rows by pair.  ``out.kind``: "values", "groups" and
    "groups_64" (scales [rows, columns / 128 or 64] are written), or "static" (scales [E] are given: the second of
    ``out.arguments``).
    """
    from moe_core.gemm.hopper import KernelForm, hopper_kernel

    special, config = _special(gemm), gemm.config
    depth = special.depth
    blocks = 1 if gemm.activation is not None and gemm.activation.gated else 2
    values = _descriptor(gemm.a.arguments[0][: gemm.routing.num_pairs], [TILE // 2, depth], depth)
    form = KernelForm(special.multiply(), constant(config.group_m), tl.constexpr(config.short_tiles))
    operands = values, _descriptor(special.tensor, [TILE, depth], depth)
    scales = gemm.a.warp_specialised, special.weight_scales
    _start(hopper_kernel, gemm, -(-gemm.weight.n // (TILE * blocks)), operands, scales, form, STAGES * TILE // depth)


def words_gemm(gemm: Gemm) -> None:
    """As `hopper_gemm`, for 4-bit words [E, rows, words] and operand A of 16 bits.

    ``gemm.a.warp_specialised`` is () where A is sorted; of tokens, (top-k,), and rows are read in whole 32 bytes.
    ``weight_scales``: `b_args` of the tile kernel's device functions, and how many groups of a step of 128 columns have
    scales of their own, 0: rows have one each.  ``multiply`` gives a function of `moe_core.gemm.marlin.quarters`.
    """
    from moe_core.gemm.marlin.hopper import WordsForm, words_kernel

    special, height = _special(gemm), gemm.order.block_m
    *arguments, groups = special.weight_scales
    heights, per_token, values = HEIGHTS[height], gemm.a.warp_specialised, gemm.a.arguments[0]
    rows_of_tiles = rows_of_tokens = None
    if per_token:
        rows_of_tokens = (values[: gemm.routing.num_pairs], values.stride(0), *per_token)
    else:
        box = [math.gcd(*heights), STEP // 2]
        rows_of_tiles = _descriptor(values[: gemm.routing.num_pairs, : gemm.weight.k], box, 128)
    form = WordsForm(
        constant(heights),
        constant(groups),
        tl.constexpr(gemm.weight.interleaved),
        tl.constexpr(bool(per_token)),
        constant(gemm.config.group_m),
        special.multiply(),
    )
    operands = rows_of_tiles, rows_of_tokens, _descriptor(special.tensor, [WORDS_TILE, WORDS], 64)
    stages = RING // (WORDS_TILE * WORDS * 4 + height * STEP * 2)
    blocks = -(-special.tensor.shape[1] // WORDS_TILE)
    _start(words_kernel, gemm, blocks, operands, (tuple(arguments),), form, stages)
