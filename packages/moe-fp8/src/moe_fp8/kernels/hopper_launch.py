"""Start the kernel of `moe_fp8.kernels.hopper`, and say when it can be used."""

from __future__ import annotations

from typing import Any

import torch
import triton
from moe_core.gemm.launch import Activation, Operand, Routing
from moe_core.gemm.plan import TileConfig, max_tiles
from moe_core.gemm.specimen import launch
from moe_core.ops.sort import SortedPairs
from torch import Tensor

#: rows and columns of a tile of one operand, and of a weight block
TILE = 128
#: steps in flight: 48 KB each, and room for the epilogue's change of layout
STAGES = 4


def hopper_fits(config: TileConfig, b: Operand, block_shape: tuple[int, int], activation: Activation | None) -> bool:
    """Whether a product that asks for the kernel (``config.specialised``) can be computed by it."""
    gated = activation is None or activation.gated
    return config.specialised and block_shape == (TILE, TILE) and b.descriptor is not None and gated


def _descriptor(matrix: Tensor) -> Any:
    """Tensor descriptor of a contiguous-column e4m3 matrix, in blocks of 128 x 128."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return TensorDescriptor.from_tensor(matrix, [TILE, TILE], layout)


def hopper_product(
    config: TileConfig,
    *,
    values: Tensor,
    scales: Tensor,
    weights: Tensor,
    b: Operand,
    out: Tensor,
    out_scale: Tensor | None,
    pairs: SortedPairs,
    routing: Routing,
    activation: Activation | None,
    pdl: bool,
) -> None:
    """One product; ``values`` [P, K] e4m3 and ``scales`` [P, K / 128] in sorted order, ``weights`` [E, rows, K].

    With an ``activation`` (gated): out [P, N] e4m3, out_scale [P, N / 128], sorted rows.  Without: out [P, N] by pair.
    """
    from moe_fp8.kernels.hopper import hopper_kernel

    up = activation is not None
    experts, rows, columns = weights.shape
    _, scale, _, _, stride_e, stride_n, _ = b.device
    blocks = triton.cdiv(b.rows, TILE if up else 2 * TILE)
    most = max_tiles(routing.ids.numel(), routing.num_experts, pairs.block_m) * blocks
    processors = torch.cuda.get_device_properties(out.device).multi_processor_count if out.is_cuda else 132
    limit = activation.limit if activation is not None else None
    launch(
        hopper_kernel,
        (min(processors, most),),
        _descriptor(values),
        _descriptor(torch.as_strided(weights, (experts * rows, columns), (weights.stride(1), 1))),
        pairs.tiles,
        pairs.offsets,
        pairs.pairs,
        scales,
        scale,
        out,
        out_scale,
        b.bias,
        routing.weights,
        b.rows,
        columns,
        rows,
        scales.stride(0),
        stride_e,
        stride_n,
        out.stride(0),
        0 if out_scale is None else out_scale.stride(0),
        0 if b.bias is None else b.bias.stride(0),
        activation.alpha if activation is not None else 0.0,
        activation.beta if activation is not None else 0.0,
        limit if limit is not None else 0.0,
        STAGES=STAGES,
        GROUP_M=config.group_m,
        UP=up,
        ACTIVATION=activation.kind if activation is not None else "",
        HAS_LIMIT=limit is not None,
        HAS_BIAS=b.bias is not None,
        WEIGHT=not up and not routing.weight_on_input,
        pdl=pdl,
        num_warps=4,
    )
