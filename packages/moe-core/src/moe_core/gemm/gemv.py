"""The layer for few tokens: two products of weights with the vector of each pair.

    gemm1     h[pair] = act(w13 x)
    gemm2     y[pair] = weight * (w2 h[pair])
    finalize  out = sum over pairs of y, in float32: a launch, or the end of gemm2

Pairs are not sorted: each reads its expert's weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from moe_core.gemm.heuristics.gemv import GemvConfig, GemvPlan
from moe_core.gemm.launch import Activation, Result, Routing, epilogue_of
from moe_core.ops.reduce import reduce_pairs

Step = Literal["gemm1", "gemm2", "gemm2_finalize"]


@dataclass(frozen=True, eq=False)
class GemvLayer(ABC):
    """A layer whose weights are multiplied by vectors; made once, like a `FusedLayer`."""

    activation: Activation

    @abstractmethod
    def reads(self, x: Tensor) -> bool:
        """Whether the kernels can read the activations."""

    def operand(
        self, name: Literal["x", "h"], values: Tensor, routing: Routing, workspace: Mapping[str, Tensor], pdl: bool
    ) -> Tensor:
        """``values``, x [tokens, hidden size] or h by pair, as they are multiplied."""
        return values

    @abstractmethod
    def multiply(self, x: Tensor, out: Tensor, routing: Routing, config: GemvConfig, step: Step, pdl: bool) -> None:
        """One launch; that of gemm2 follows the one of gemm1.

        - "gemm1": ``out`` [pairs, intermediate size] of ``x`` [tokens, hidden size]
        - "gemm2": [pairs, hidden size] float32 of ``x`` [pairs, intermediate size]
        - "gemm2_finalize": the layer's [tokens, hidden size], of a plan that says ``fuse_finalize``
        """

    def __call__(
        self, x: Tensor, out: Tensor, *, routing: Routing, plan: GemvPlan, workspace: Mapping[str, Tensor]
    ) -> None:
        """As a `FusedLayer`, for ``x`` of one token, or a few, that :meth:`reads` takes.

        ``workspace`` has "h" [pairs, whole tiles of columns] and room for y in "partials".
        """
        h, columns = workspace["h"], out.shape[1]
        x = self.operand("x", x, routing, workspace, plan.pdl)
        self.multiply(x, h, routing, plan.gemm1, "gemm1", plan.pdl)
        h = self.operand("h", h, routing, workspace, plan.pdl)
        if plan.fuse_finalize:
            self.multiply(h, out, routing, plan.gemm2, "gemm2_finalize", plan.pdl)
            return
        y = workspace["partials"][: routing.num_pairs * columns].view(-1, columns)
        self.multiply(h, y, routing, plan.gemm2, "gemm2", plan.pdl)
        reduce_pairs(y, routing.ids, routing.num_experts, out, expert_map=routing.expert_map, pdl=plan.pdl)


def vector_arguments(
    out: Tensor,
    x: Tensor,
    weight: tuple[Any, ...],
    n: int,
    k: int,
    bias: Tensor | None,
    routing: Routing,
    activation: Activation | None,
) -> tuple[Any, ...]:
    """What all kernels get first: ``out`` [pairs, N] of ``x`` [tokens, K], or of [pairs, K] without ``activation``.

    ``weight``: the kernel's own arguments, `b_args`.
    """
    epilogue = epilogue_of(bias, routing, activation)
    return Result.of(out), x, x.stride(0), weight, routing.arguments, epilogue, n, k
