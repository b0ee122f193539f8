"""The layer for a single token: two GEMVs, without tensor cores.

    gemm1     h[pair] = act(w13 x)
    gemm2     y[pair] = weight * (w2 h[pair])
    finalize  out = sum over pairs of y, in float32

Pairs are not sorted: each reads its expert's weights.  These are those of `moe_core.gemm.marlin.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from moe_core.gemm.heuristics.gemv import GemvConfig, GemvPlan
from moe_core.gemm.launch import Activation, Routing
from moe_core.gemm.marlin._gemv_kernels import gemv_kernel
from moe_core.gemm.marlin.weight import MarlinMatrix
from moe_core.jit.launch import launch
from moe_core.ops.reduce import reduce_pairs


@dataclass(frozen=True, eq=False)
class GemvFunctions:
    """An element type's device function, and what its scales are; see `moe_core.gemm.marlin._gemv_kernels`.

    ``places``: the powers of two by which numbers are too large.
    """

    dequantize: Any
    scales: str
    places: tuple[int, ...] = (0,) * 8


@dataclass(frozen=True, eq=False)
class GemvLayer:
    """The layer whose ``w13`` and ``w2`` are multiplied by vectors; made once, like a `FusedLayer`."""

    functions: GemvFunctions
    w13: MarlinMatrix
    w2: MarlinMatrix
    activation: Activation

    def reads(self, x: Tensor) -> bool:
        """Whether the kernels can read the activations: two numbers at a time, in the order of their columns."""
        if any(m.index is not None or m.pre_scales is not None or m.k % 2 for m in (self.w13, self.w2)):
            return False
        return x.data_ptr() % 4 == 0 and x.stride(0) % 2 == 0

    def __call__(
        self, x: Tensor, out: Tensor, *, routing: Routing, plan: GemvPlan, workspace: Mapping[str, Tensor]
    ) -> None:
        """As a `FusedLayer`, for ``x`` of one token, or a few, that :meth:`reads` takes."""
        h, on_input, pdl = workspace["h"], routing.weight_on_input, plan.pdl
        y = workspace["partials"][: routing.num_pairs * self.w2.n].view(-1, self.w2.n)
        gemm1, gemm2 = _constants(self.functions, self.w13, plan.gemm1), _constants(self.functions, self.w2, plan.gemm2)
        _gemv(
            x, self.w13, h, routing, self.activation, routing.top_k, gemm1 | {"ROUTER_WEIGHT": int(on_input)}, pdl=pdl
        )
        _gemv(h, self.w2, y, routing, None, 1, gemm2 | {"ROUTER_WEIGHT": 0 if on_input else 2}, pdl=pdl)
        reduce_pairs(y, routing.ids, routing.num_experts, out, expert_map=routing.expert_map, pdl=pdl)


def _gemv(
    x: Tensor,
    matrix: MarlinMatrix,
    out: Tensor,
    routing: Routing,
    activation: Activation | None,
    pairs_per_row: int,
    constants: dict[str, Any],
    *,
    pdl: bool,
) -> None:
    bias, limit = matrix.bias, None if activation is None else activation.limit
    launch(
        gemv_kernel,
        (routing.num_pairs * triton.cdiv(matrix.words.shape[1], constants["BLOCK_N"]),),
        out,
        x,
        matrix.arguments,
        routing.ids,
        routing.expert_map,
        routing.weights,
        bias,
        matrix.n,
        matrix.k,
        routing.num_ids,
        routing.num_experts,
        out.stride(0),
        x.stride(0),
        0 if bias is None else bias.stride(0),
        pairs_per_row,
        1.0 if activation is None else activation.alpha,
        0.0 if activation is None else activation.beta,
        0.0 if limit is None else limit,
        **constants,
        GATED=matrix.interleaved,
        ACTIVATION="" if activation is None else activation.kind,
        HAS_LIMIT=limit is not None,
        HAS_BIAS=bias is not None,
        HAS_MAP=routing.expert_map is not None,
        pdl=pdl,
    )


def _constants(functions: GemvFunctions, matrix: MarlinMatrix, config: GemvConfig) -> dict[str, Any]:
    rows, width = matrix.words.shape[1:]
    return {
        "dequantize": functions.dequantize,
        "BITS": matrix.bits,
        "PLACES": functions.places,
        "SCALES": functions.scales,
        "GROUP": matrix.group_size,
        "BLOCK_N": config.block_n,
        "BLOCK_W": config.block_w,
        "EVEN": rows % config.block_n == 0 and width % config.block_w == 0,
        "num_warps": config.num_warps,
    }
