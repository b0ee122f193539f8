"""The layer for few tokens: two GEMVs per pair.

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

from moe_core.kernels.gemm.plan import GemvConfig, GemvPlan
from moe_core.kernels.gemm.tiles.launch import Activation, Result, Routing, epilogue_of
from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops.reduce import reduce_pairs


@dataclass(frozen=True, eq=False)
class Product:
    """One launch: gemm1 (with an ``activation``) or gemm2 (without), which follows it.

    Attributes:
        x: gemm1: [tokens, hidden size]; gemm2: [pairs, intermediate size].
        out: gemm1: [pairs, intermediate size]; gemm2: float32 [pairs, hidden size].
        routing: Routing of the call.
        config: Launch parameters.
        pdl: Whether the launch overlaps with its neighbors.
        activation: Activation of gemm1; None for gemm2.
        finalizes: Whether gemm2 sums the pairs (``fuse_finalize`` of the plan); ``out`` is then the layer's output
            [tokens, hidden size].
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
        """Launch a kernel with the arguments that all GEMV kernels share.

        Args:
            kernel: The kernel.
            programs: Number of programs.
            weight: Object with ``n``, ``k`` and a ``bias``.
            b_args: Kernel-specific weight arguments.
            form: Kernel-specific compile-time parameters.
            constants: Further constants and launch options.
        """
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
    """A layer whose weights are multiplied by vectors; built once, like a `FusedLayer`.

    Attributes:
        activation: Activation between the two GEMVs.
    """

    activation: Activation

    @abstractmethod
    def reads(self, x: Tensor) -> bool:
        """Whether the kernels can read the activations.

        Args:
            x: Hidden states.

        Returns:
            True if they can.
        """

    def operand(
        self, name: Literal["x", "h"], values: Tensor, routing: Routing, workspace: Mapping[str, Tensor], pdl: bool
    ) -> Tensor:
        """Return the activations in the form that the GEMV multiplies; unchanged by default.

        Args:
            name: "x" or "h".
            values: x [tokens, hidden size], or h by pair.
            routing: Routing of the call.
            workspace: Workspace tensors by name.
            pdl: Whether launches overlap.

        Returns:
            The operand.
        """
        return values

    @abstractmethod
    def multiply(self, product: Product) -> None:
        """Launch one GEMV.

        Args:
            product: The GEMV.
        """

    def __call__(
        self, x: Tensor, out: Tensor, routing: Routing, plan: GemvPlan, workspace: Mapping[str, Tensor]
    ) -> None:
        """Write the layer's output to ``out``, as a `FusedLayer` does.

        Args:
            x: [M, K] of one token or a few, which :meth:`reads` accepts.
            out: [M, K].
            routing: Routing of the call.
            plan: Launch parameters.
            workspace: Workspace tensors by name: "h" [pairs, whole tiles of columns], and "partials" with space for y.
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
