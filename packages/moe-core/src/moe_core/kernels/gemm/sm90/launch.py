"""Start the warp-specialised kernel of `moe_core.kernels.gemm.sm90.kernel`; what starting another one shares with
it."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from moe_core.kernels.gemm.tiles.launch import Gemm, WarpSpecialisedGemm, constant, rows_of_experts, weight_strides
from moe_core.kernels.launch.launch import launch

#: rows and columns of a tile of one operand, and of a weight block
TILE = 128
#: steps in flight, of 128 columns: 48 KB each, and room for the epilogue's change of layout
STAGES = 4


def descriptor(matrix: Tensor, block: list[int], swizzle: int) -> Any:
    """Tensor descriptor of a contiguous-column matrix, or of experts' weights as `rows_of_experts` has them."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    matrix = matrix if matrix.dim() == 2 else rows_of_experts(matrix)
    bits = 8 * matrix.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
    return TensorDescriptor.from_tensor(matrix, block, layout)


def specialised(gemm: Gemm) -> WarpSpecialisedGemm:
    """How the kernel computes the GEMM.  Raises TypeError where the weight has none."""
    if gemm.weight.warp_specialised is None:
        raise TypeError("the weight has no warp-specialised kernel")
    return gemm.weight.warp_specialised


def start(
    kernel: Any,
    gemm: Gemm,
    blocks: int,
    operands: tuple[Any, ...],
    scales: tuple[Any, ...],
    rows: Any,
    form: Any,
    stages: int,
) -> None:
    """A program for each multiprocessor, at most one for each tile of ``blocks`` column blocks.

    ``rows``: where the kernel finds an expert's weights in their matrix.
    """
    device, weight = gemm.result.out.device, gemm.weight
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    launch(
        kernel,
        (min(num_sms, gemm.routing.max_tiles(gemm.order.block_m) * blocks),),
        *operands,
        gemm.order.for_kernels,
        *scales,
        gemm.result,
        gemm.epilogue,
        weight.n,
        weight.k,
        rows,
        form,
        STAGES=stages,
        pdl=gemm.pdl,
        num_warps=4,
    )


def hopper_gemm(gemm: Gemm) -> None:
    """One GEMM of operand A [P, K] by sorted row and a weight, of one type of one byte.

    The weight's ``functions`` (see `moe_core.kernels.gemm.sm90.kernel`) get the rows' ``gemm.a.warp_specialised`` and
    its scales. With an activation the result has sorted rows, without, rows by pair.
    """
    from moe_core.kernels.gemm.sm90.kernel import KernelForm, hopper_kernel

    special, config = specialised(gemm), gemm.config
    depth = special.depth
    blocks = 1 if gemm.activation is not None and gemm.activation.gated else 2
    values = descriptor(gemm.a.arguments[0][: gemm.routing.num_pairs], [TILE // 2, depth], depth)
    prefetch, multiply = special.functions()
    form = KernelForm(prefetch, multiply, constant(config.group_m), tl.constexpr(config.short_tiles))
    operands = values, descriptor(special.tensor, [TILE, depth], depth)
    scales = gemm.a.warp_specialised, special.weight_scales
    expert, row, step = weight_strides(special.tensor, depth)
    strides = expert // row, *divmod(step, row)
    column_blocks, stages = -(-gemm.weight.n // (TILE * blocks)), STAGES * TILE // depth
    start(hopper_kernel, gemm, column_blocks, operands, scales, strides, form, stages)
