"""Experts of 8-bit weights and activations whose few tokens need no sort.  Importing this imports no Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.kernels.gemm.heuristics.gemv import MOST_SCALED, GemvPlan
from moe_core.spec.weights import KernelWeights
from moe_core.spec.workspace import WorkspaceSpec

if TYPE_CHECKING:
    from moe_core.kernels.gemm.gemv.plan import GemvLayer


class ScaledGemvExperts(GroupedExperts):
    """`moe_core.kernels.gemm.gemv.scaled` for few tokens; subclasses say how vectors are quantised."""

    @property
    def takes_vectors(self) -> bool:
        # adapters read x and h between the launches
        return not self.batched and not self.config.is_lora_enabled

    def gemv_plan(self, num_tokens: int, on_gpu: bool = True) -> GemvPlan | None:
        # Triton's interpreter does not know the kernel
        return super().gemv_plan(num_tokens) if on_gpu else None

    def vector_groups(self) -> tuple[Any, int]:
        """What quantises groups of so many columns of a vector; (None, 0): it has one scale."""
        return None, 0

    def vector_scales(self, weights: KernelWeights) -> tuple[Tensor | None, Tensor | None]:
        """Static scales of x and h [E], if they have such."""
        return None, None

    def gemv_layer(self, weights: KernelWeights) -> GemvLayer | None:
        from moe_core.kernels.gemm.gemv.scaled import ScaledGemvLayer
        from moe_core.kernels.gemm.tiles.launch import Activation

        if not self.takes_vectors:
            return None
        w13, w2 = (self.gemm_weight(name, weights) for name in ("w13", "w2"))
        activation = Activation.of(self.config)
        return ScaledGemvLayer(activation, w13, w2, *self.vector_groups(), *self.vector_scales(weights))

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        from moe_core.kernels.gemm.fused.scheme import CallShape, padded

        found = super().workspaces(num_tokens)
        if not self.takes_vectors or self.problem.capability != 90:
            return found
        shape = CallShape(self.config, min(num_tokens, MOST_SCALED))
        h = WorkspaceSpec("h", (shape.pairs, padded(self.config.intermediate_size)), shape.wide)
        # of other calls it may be quantised where it is made
        others = tuple(spec for spec in found if spec.name != "h")
        rows = (spec.shape[0] for spec in found if spec.name == "h")
        return *others, replace(h, shape=(max(shape.pairs, *rows), h.shape[1]))
