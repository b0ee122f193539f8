"""Start the kernel of `moe_core.gemm.hopper`, and say when it can be used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_core.gemm.launch import Activation, GemmWeight, Result, Routing, epilogue_of, schedule_of
from moe_core.gemm.plan import TileConfig
from moe_core.jit.launch import launch
from moe_core.ops.batch import Batch, BatchedRows
from moe_core.ops.sort import SortedPairs

#: rows and columns of a tile of one operand, and of a weight block
TILE = 128
#: steps in flight, of 128 columns: 48 KB each, and room for the epilogue's change of layout
STAGES = 4


def hopper_fits(config: TileConfig, weight: GemmWeight) -> bool:
    """Whether the kernel is asked for (``config.warp_specialised``) and can read ``weight``."""
    return config.warp_specialised and weight.descriptor is not None


def _descriptor(matrix: Tensor, rows: int, depth: int) -> Any:
    """Tensor descriptor of a contiguous-column matrix of one-byte elements, in blocks of ``rows`` x ``depth``."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=depth, element_bitwidth=8, rank=2)
    return TensorDescriptor.from_tensor(matrix, [rows, depth], layout)


def hopper_gemm(
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
    """One GEMM; ``values`` [P, K] by sorted row and ``weight``, of one type of one byte.

    ``weight.warp_specialised.multiply`` (see `moe_core.gemm.hopper`) gets the rows' ``scales`` and those of the weight.
    With an ``activation`` ``out`` has sorted rows; without, rows by pair.  ``out.kind``: "values", "groups" and
    "groups_64" (scales [rows, columns / 128 or 64] are written), or "static" (scales [E] are given: the second of
    ``out.arguments``).
    """
    from moe_core.gemm.hopper import hopper_kernel

    special = weight.warp_specialised
    if special is None:
        raise TypeError("the weight has no warp-specialised kernel")
    tensor, depth = special.tensor, special.depth
    experts, rows, columns = tensor.shape
    blocks = 1 if activation is not None and activation.gated else 2
    max_tiles = routing.max_tiles(pairs.block_m) * -(-weight.n // (TILE * blocks))
    device = out.values.device
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    launch(
        hopper_kernel,
        (min(num_sms, max_tiles),),
        _descriptor(values, TILE // 2, depth),
        _descriptor(torch.as_strided(tensor, (experts * rows, columns), (tensor.stride(1), 1)), TILE, depth),
        schedule_of(pairs),
        scales,
        special.weight_scales,
        out.kernel_arguments(),
        epilogue_of(weight.bias, routing, activation),
        weight.n,
        columns,
        rows,
        multiply=special.multiply(),
        STAGES=STAGES * TILE // depth,
        GROUP_M=config.group_m,
        SHORT=config.short_tiles,
        pdl=pdl,
        num_warps=4,
    )
