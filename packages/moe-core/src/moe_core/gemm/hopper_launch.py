"""Start the kernel of `moe_core.gemm.hopper`, and say when it can be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from moe_core.gemm.launch import Activation, Operand, Routing
from moe_core.gemm.plan import TileConfig
from moe_core.jit.launch import launch
from moe_core.ops.batch import Batch, BatchedRows
from moe_core.ops.sort import SortedPairs

#: rows and columns of a tile of one operand, and of a weight block
TILE = 128
#: steps in flight, of 128 columns: 48 KB each, and room for the epilogue's change of layout
STAGES = 4


@dataclass(frozen=True, eq=False)
class HopperResult:
    """Where a product of the kernel goes; see `moe_core.gemm.hopper_finish`.

    ``values`` [rows, columns]; ``scales`` to be written, [rows, columns / 128] (``kind`` "groups") or
    [rows, columns / 64] ("groups_64"), or given, [E] ("static").  ``amax`` and ``amax_kind`` as in
    `moe_core.gemm.launch.Result`: "row" and "tensor" with "values", "nan" with "static".
    """

    values: Tensor
    kind: str = "values"
    scales: Tensor | None = None
    amax: Tensor | None = None
    amax_kind: str = ""


def hopper_fits(config: TileConfig, *operands: Operand) -> bool:
    """Whether a product that asks for the kernel (``config.specialised``) can be computed by it."""
    return config.specialised and all(operand.descriptor is not None for operand in operands)


def _descriptor(matrix: Tensor, depth: int) -> Any:
    """Tensor descriptor of a contiguous-column matrix of one-byte elements, in blocks of 128 x ``depth``."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=depth, element_bitwidth=8, rank=2)
    return TensorDescriptor.from_tensor(matrix, [TILE, depth], layout)


def hopper_product(
    config: TileConfig,
    *,
    multiply: Any,
    values: Tensor,
    scales: tuple[Any, ...],
    weights: Tensor,
    weight_scales: tuple[Any, ...],
    b: Operand,
    out: HopperResult,
    pairs: SortedPairs | BatchedRows,
    routing: Routing | Batch,
    activation: Activation | None,
    pdl: bool,
    depth: int = TILE,
) -> None:
    """One product; ``values`` [P, K] by sorted row and ``weights`` [E, rows, K], of one type of one byte.

    ``multiply`` (see `moe_core.gemm.hopper`) gets ``scales`` and ``weight_scales``.  With an ``activation``
    out has sorted rows; without, rows by pair.  ``depth`` of a step: 128 or 64 columns, of which the larger is faster.
    """
    from moe_core.gemm.hopper import hopper_kernel

    up = activation is not None
    gated = activation is not None and activation.gated
    experts, rows, columns = weights.shape
    most = routing.max_tiles(pairs.block_m) * triton.cdiv(b.rows, TILE if gated else 2 * TILE)
    result = out.values
    processors = torch.cuda.get_device_properties(result.device).multi_processor_count if result.is_cuda else 132
    limit = activation.limit if activation is not None else None
    weight = 0
    if isinstance(routing, Routing) and routing.weights is not None:
        weight = 0 if up != routing.weight_on_input else (1 if up else 2)
    launch(
        hopper_kernel,
        (min(processors, most),),
        _descriptor(values, depth),
        _descriptor(torch.as_strided(weights, (experts * rows, columns), (weights.stride(1), 1)), depth),
        (pairs.tiles, pairs.offsets, pairs.pairs if isinstance(pairs, SortedPairs) else None),
        scales,
        weight_scales,
        (
            result,
            out.scales,
            out.amax,
            result.stride(0),
            0 if out.scales is None else out.scales.stride(0),
            result.shape[1],
        ),
        (
            b.bias,
            0 if b.bias is None else b.bias.stride(0),
            routing.weights if weight and isinstance(routing, Routing) else None,
            activation.alpha if activation is not None else 0.0,
            activation.beta if activation is not None else 0.0,
            limit if limit is not None else 0.0,
        ),
        b.rows,
        columns,
        rows,
        multiply=multiply,
        STAGES=STAGES * TILE // depth,
        GROUP_M=config.group_m,
        UP=up,
        GATED=gated,
        ACTIVATION=activation.kind if activation is not None else "",
        HAS_LIMIT=limit is not None,
        HAS_BIAS=b.bias is not None,
        WEIGHT=weight,
        OUT=out.kind,
        AMAX=out.amax_kind,
        pdl=pdl,
        num_warps=4,
    )
