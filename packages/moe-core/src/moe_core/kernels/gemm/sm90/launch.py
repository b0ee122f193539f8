"""Launch of the warp-specialized kernel of `moe_core.kernels.gemm.sm90.kernel`.

Launches of other sm_90 kernels share its helpers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from moe_core.kernels.gemm.tiles.launch import Gemm, WarpSpecializedGemm, constant, rows_of_experts, weight_strides
from moe_core.kernels.launch.launch import launch

#: Rows and columns of a tile of one operand, and of a weight block.
TILE = 128
#: Steps of 128 columns in flight: 48 KB each, plus space for the epilogue's layout conversion.
STAGES = 4


def descriptor(matrix: Tensor, block: list[int], swizzle: int) -> Any:
    """Return a tensor descriptor of a matrix or of experts' weights.

    Args:
        matrix: Matrix with contiguous columns, or weights that `rows_of_experts` accepts.
        block: Rows and columns of a block.
        swizzle: Swizzle width in bytes.

    Returns:
        The tensor descriptor.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    matrix = matrix if matrix.dim() == 2 else rows_of_experts(matrix)
    bits = 8 * matrix.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
    return TensorDescriptor.from_tensor(matrix, block, layout)


def specialized(gemm: Gemm) -> WarpSpecializedGemm:
    """Return how the warp-specialized kernel computes a GEMM.

    Args:
        gemm: The GEMM.

    Returns:
        The weight's warp-specialized form.

    Raises:
        TypeError: The weight has none.
    """
    if gemm.weight.warp_specialized is None:
        raise TypeError("warp_specialized is None: this weight has no warp-specialized kernel")
    return gemm.weight.warp_specialized


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
    """Launch a persistent kernel: one CTA per SM, at most one per tile and column block.

    Args:
        kernel: The kernel.
        gemm: The GEMM.
        blocks: Number of column blocks.
        operands: Arguments of the operands.
        scales: Arguments of the scales.
        rows: Where the kernel finds an expert's weights in their matrix.
        form: Compile-time parameters of the kernel.
        stages: Stages of the ring buffer.
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
    """Run a GEMM of sorted operand A [P, K] and a weight with the same one-byte dtype.

    The weight's ``functions`` (see `moe_core.kernels.gemm.sm90.kernel`) receive ``gemm.a.warp_specialized`` of the rows
    and the scales of the weight. The result has sorted rows with an activation, and rows by pair without.

    Args:
        gemm: The GEMM.

    Raises:
        TypeError: The weight has no warp-specialized kernel.
    """
    from moe_core.kernels.gemm.sm90.kernel import KernelForm, hopper_kernel

    special, config = specialized(gemm), gemm.config
    depth = special.depth
    blocks = 1 if gemm.activation is not None and gemm.activation.gated else 2
    values = descriptor(gemm.a.arguments[0][: gemm.routing.num_pairs], [TILE // 2, depth], depth)
    prefetch, multiply = special.functions()
    form = KernelForm(prefetch, multiply, constant(config.group_m), tl.constexpr(config.short_tiles))
    operands = values, descriptor(special.tensor, [TILE, depth], depth)
    scales = gemm.a.warp_specialized, special.weight_scales
    expert, row, step = weight_strides(special.tensor, depth)
    strides = expert // row, *divmod(step, row)
    column_blocks, stages = -(-gemm.weight.n // (TILE * blocks)), STAGES * TILE // depth
    start(hopper_kernel, gemm, column_blocks, operands, scales, strides, form, stages)
