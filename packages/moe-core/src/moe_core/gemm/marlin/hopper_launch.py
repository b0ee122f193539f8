"""Start the kernel of `moe_core.gemm.marlin.hopper`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_core.gemm.launch import (
    Activation,
    GemmWeight,
    Result,
    Routing,
    WarpSpecialisedGemm,
    epilogue_of,
    schedule_of,
)
from moe_core.gemm.plan import TileConfig
from moe_core.jit.launch import launch
from moe_core.ops.batch import Batch, BatchedRows
from moe_core.ops.sort import SortedPairs

#: rows of weights of a tile, columns of a step, and words that these are
TILE = 256
STEP = 128
WORDS = 16
#: shared memory for operands: what is left is room for the epilogue's change of layout
RING = 196608
#: heights that tiles take, by the rows that the schedule's have: what an expert's last rows need
HEIGHTS = {128: (128, 96, 64), 64: (64, 48, 32)}


def words_multiplied(
    words: Tensor, arguments: tuple[Any, ...], groups: int, dequantize: Callable[[], Any]
) -> WarpSpecialisedGemm:
    """How the kernel multiplies 4-bit ``words`` [E, rows, words].

    ``arguments``: `b_args` of the tile kernel's device functions; ``groups`` of a step of 128 columns that have scales
    of their own, 0: rows have one each; ``dequantize`` gives a function of `moe_core.gemm.marlin.quarters`.
    """
    return WarpSpecialisedGemm(words, dequantize, (*arguments, groups), STEP, words_gemm, tuple(HEIGHTS), gathers=True)


def words_gemm(
    config: TileConfig,
    *,
    weight: GemmWeight,
    values: Tensor,
    scales: tuple[Any, ...],
    out: Result,
    pairs: SortedPairs | BatchedRows,
    routing: Routing | Batch,
    activation: Activation | None,
    pdl: bool,
) -> None:
    """As `moe_core.gemm.hopper_launch.hopper_gemm`, for ``values`` [P, K] of 16 bits, which have no scales.

    ``scales`` () where they are sorted; of tokens, (top-k,), in whole 32 bytes.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from moe_core.gemm.marlin.hopper import words_kernel

    special = weight.warp_specialised
    if special is None:
        raise TypeError("the weight has no warp-specialised kernel")
    *arguments, groups = special.weight_scales
    words = special.tensor
    experts, rows, width = words.shape
    height = pairs.block_m
    heights = HEIGHTS[height]
    stages = RING // (TILE * WORDS * 4 + height * STEP * 2)
    device = out.values.device
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    rows_of_tiles = rows_of_tokens = None
    if scales:
        rows_of_tokens = (values, values.stride(0), *scales)
    else:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        box = [math.gcd(*heights), STEP // 2]
        rows_of_tiles = TensorDescriptor.from_tensor(values[:, : weight.k], box, layout)
    launch(
        words_kernel,
        (min(num_sms, routing.max_tiles(height) * -(-rows // TILE)),),
        rows_of_tiles,
        rows_of_tokens,
        TensorDescriptor.from_tensor(
            torch.as_strided(words, (experts * rows, width), (words.stride(1), 1)),
            [TILE, WORDS],
            gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2),
        ),
        schedule_of(pairs),
        tuple(arguments),
        out.kernel_arguments(),
        epilogue_of(weight.bias, routing, activation),
        weight.n,
        weight.k,
        rows,
        HEIGHTS=heights,
        STAGES=stages,
        GROUPS=groups,
        INTERLEAVED=weight.interleaved,
        GROUP_M=config.group_m,
        dequantize=special.multiply(),
        pdl=pdl,
        num_warps=4,
    )
