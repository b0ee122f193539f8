"""Start the kernels that quantise whole rows: where they are, or straight into the sorted order."""

from __future__ import annotations

from torch import Tensor

from moe_core.gemm.launch import InUse, Routing
from moe_core.gemm.quantize_rows_kernels import quantize_rows_kernel, scatter_quantize_kernel
from moe_core.jit.launch import launch
from moe_core.ops.sort import QuantizeRows, SortedPairs


def quantize_rows(rows: QuantizeRows, in_use: InUse, *, pdl: bool) -> None:
    """Quantise ``rows``, whose groups are whole rows, where they are in use."""
    block_r = max(4096 // rows.group, 1)
    # of rows of one column `ptxas` 12.8 breaks down with fewer warps
    fewest = 8 if rows.x.shape[1] == 1 else 4
    launch(
        quantize_rows_kernel,
        (-(-rows.num_groups // block_r),),
        rows.for_kernels,
        rows.x.shape[0],
        in_use[1],
        IN_USE=in_use[0],
        BLOCK_R=block_r,
        pdl=pdl,
        num_warps=min(max(rows.group // 1024, fewest), 16),
    )


def scatter_quantize(
    rows: QuantizeRows,
    *,
    pairs: SortedPairs,
    routing: Routing,
    by_expert: bool = False,
    x_scale: Tensor | None = None,
    pdl: bool,
) -> None:
    """Quantise ``rows.x`` [M, K] into the sorted order: ``rows.values`` [P, K padded], ``rows.scales`` [P, groups].

    ``by_expert``: the result depends on the expert (static scales), so that each pair is quantised by itself.
    ``x_scale`` [M, groups]: ``rows.x`` are codes already, which only change places, with their scales.
    ``pairs`` need their positions (`sort_pairs(positions=True)`).
    """
    # 16 groups of 128: programs enough for many rows, bytes enough for each
    block_g = max(2048 // rows.group, 1)
    launch(
        scatter_quantize_kernel,
        (-(-rows.num_groups // block_g),),
        rows.for_kernels,
        rows.x.shape[0],
        routing.arguments,
        pairs.positions,
        x_scale,
        0 if x_scale is None else x_scale.stride(0),
        TOP_K=routing.top_k,
        BLOCK_G=block_g,
        BY_EXPERT=by_expert,
        pdl=pdl,
        num_warps=4 if rows.group <= 4096 else 8,
    )
