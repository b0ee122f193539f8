"""Start `scatter_quantize_kernel`: quantise rows straight into the sorted order."""

from __future__ import annotations

from torch import Tensor

from moe_core.gemm.launch import Routing
from moe_core.gemm.scatter_quantize_kernel import scatter_quantize_kernel
from moe_core.jit.launch import launch
from moe_core.ops.sort import QuantizeRows, SortedPairs


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
        rows.x,
        routing.ids,
        routing.expert_map,
        pairs.positions,
        *rows.kernel_arguments[1:7],
        routing.num_ids,
        routing.num_experts,
        *rows.kernel_arguments[7:],
        x_scale,
        0 if x_scale is None else x_scale.stride(0),
        quantize=rows.quantize,
        TOP_K=routing.top_k,
        HAS_MAP=routing.expert_map is not None,
        GROUP=rows.group,
        BLOCK_G=block_g,
        EVEN=rows.is_even,
        BY_EXPERT=by_expert,
        pdl=pdl,
        num_warps=4 if rows.group <= 4096 else 8,
    )
