"""Start the kernel of `moe_core.gemm.hopper`, and say when it can be used."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from moe_core.gemm.launch import Activation, GemmWeight, Result, Routing
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


def _descriptor(matrix: Tensor, depth: int) -> Any:
    """Tensor descriptor of a contiguous-column matrix of one-byte elements, in blocks of 128 x ``depth``."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=depth, element_bitwidth=8, rank=2)
    return TensorDescriptor.from_tensor(matrix, [TILE, depth], layout)


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
    "groups_64" (scales [rows, columns / 128 or 64] are written), or "static" (scales [E] are given: the first of
    ``out.arguments``).
    """
    from moe_core.gemm.hopper import hopper_kernel

    special = weight.warp_specialised
    if special is None:
        raise TypeError("the weight has no warp-specialised kernel")
    depth, b = special.depth, weight
    gemm1 = activation is not None
    gated = activation is not None and activation.gated
    experts, rows, columns = special.tensor.shape
    tensor = special.tensor
    found = out.arguments[0] if out.kind == "static" and out.arguments is not None else out.scales
    max_tiles = routing.max_tiles(pairs.block_m) * triton.cdiv(b.n, TILE if gated else 2 * TILE)
    result = out.values
    num_sms = torch.cuda.get_device_properties(result.device).multi_processor_count if result.is_cuda else 132
    limit = activation.limit if activation is not None else None
    router_weight = 0
    if isinstance(routing, Routing) and routing.weights is not None:
        router_weight = 0 if gemm1 != routing.weight_on_input else (1 if gemm1 else 2)
    launch(
        hopper_kernel,
        (min(num_sms, max_tiles),),
        _descriptor(values, depth),
        _descriptor(torch.as_strided(tensor, (experts * rows, columns), (tensor.stride(1), 1)), depth),
        (pairs.tiles, pairs.offsets, pairs.pairs if isinstance(pairs, SortedPairs) else None),
        scales,
        special.weight_scales,
        (
            result,
            found,
            out.amax,
            result.stride(0),
            0 if found is None else found.stride(0),
            result.shape[1],
        ),
        (
            b.bias,
            0 if b.bias is None else b.bias.stride(0),
            routing.weights if router_weight and isinstance(routing, Routing) else None,
            activation.alpha if activation is not None else 0.0,
            activation.beta if activation is not None else 0.0,
            limit if limit is not None else 0.0,
        ),
        b.n,
        columns,
        rows,
        multiply=special.multiply(),
        STAGES=STAGES * TILE // depth,
        GROUP_M=config.group_m,
        GEMM1=gemm1,
        GATED=gated,
        ACTIVATION=activation.kind if activation is not None else "",
        HAS_LIMIT=limit is not None,
        HAS_BIAS=b.bias is not None,
        ROUTER_WEIGHT=router_weight,
        OUT=out.kind,
        AMAX=out.amax_kind,
        pdl=pdl,
        num_warps=4,
    )
