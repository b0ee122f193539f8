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

from moe_core.kernels.gemm.heuristics.gemv import GemvConfig, GemvPlan
from moe_core.kernels.gemm.tiles.launch import Activation, Result, Routing, epilogue_of
from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops.reduce import reduce_pairs


@dataclass(frozen=True, eq=False)
class Product:
    """One launch: gemm1 with an ``activation``, gemm2, which follows it, without.

    ``out`` [pairs, intermediate size] of ``x`` [tokens, hidden size], or float32 [pairs, hidden size] of ``x`` [pairs,
    intermediate size].  ``finalizes``: gemm2 of a plan that says ``fuse_finalize``, to the layer's [tokens, hidden
    size].
    """

    x: Tensor
    out: Tensor
    routing: Routing
    config: GemvConfig
    pdl: bool = False
    activation: Activation | None = None
    finalizes: bool = False

    def start(
        self, kernel: Any, programs: int, weight: Any, b_args: tuple[Any, ...], form: tuple[Any, ...], **constants: Any
    ) -> None:
        """With what all kernels get; ``weight`` has ``n``, ``k`` and a ``bias``, ``b_args`` are the kernel's own."""
        launch(
            kernel,
            (programs,),
            Result.of(self.out),
            self.x,
            self.x.stride(0),
            b_args,
            self.routing.arguments,
            epilogue_of(weight.bias, self.routing, self.activation),
            weight.n,
            weight.k,
            form,
            SECOND=self.activation is None,
            ALONG_M=self.config.along_m,
            pdl=self.pdl,
            num_warps=self.config.num_warps,
            **constants,
        )


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
    def multiply(self, product: Product) -> None:
        """Start one product."""

    def __call__(
        self, x: Tensor, out: Tensor, *, routing: Routing, plan: GemvPlan, workspace: Mapping[str, Tensor]
    ) -> None:
        """As a `FusedLayer`, for ``x`` of one token, or a few, that :meth:`reads` takes.

        ``workspace`` has "h" [pairs, whole tiles of columns] and room for y in "partials".
        """
        h, columns, pdl = workspace["h"], out.shape[1], plan.pdl
        x = self.operand("x", x, routing, workspace, pdl)
        self.multiply(Product(x, h, routing, plan.gemm1, pdl, self.activation))
        h = self.operand("h", h, routing, workspace, pdl)
        if plan.fuse_finalize:
            self.multiply(Product(h, out, routing, plan.gemm2, pdl, finalizes=True))
            return
        y = workspace["partials"][: routing.num_pairs * columns].view(-1, columns)
        self.multiply(Product(h, y, routing, plan.gemm2, pdl))
        reduce_pairs(y, routing.ids, routing.num_experts, out, expert_map=routing.expert_map, pdl=pdl)
