"""Base of experts of 8-bit weights and activations that compute small M without a sort.

Importing this module does not import Triton.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.kernels.gemm.heuristics.gemv import MOST
from moe_core.kernels.gemm.plan import GemvPlan
from moe_core.spec.weights import KernelWeights
from moe_core.spec.workspace import WorkspaceSpec

if TYPE_CHECKING:
    from moe_core.kernels.gemm.gemv.plan import GemvLayer


class ScaledGemvExperts(GroupedExperts):
    """Experts that use `moe_core.kernels.gemm.gemv.scaled` for small M.

    Subclasses define how vectors are quantized.
    """

    @property
    def takes_vectors(self) -> bool:
        # LoRA reads x and h between the launches
        return not self.batched and not self.config.is_lora_enabled

    def gemv_plan(self, num_tokens: int, on_gpu: bool = True) -> GemvPlan | None:
        # Triton's interpreter does not support the kernel
        return super().gemv_plan(num_tokens) if on_gpu else None

    def vector_groups(self) -> tuple[Any, int]:
        """Return the group quantizer of a vector and its group size.

        The result is (None, 0) if a vector has one scale.
        """
        return None, 0

    def vector_scales(self, weights: KernelWeights) -> tuple[Tensor | None, Tensor | None]:
        """Return the static scales of x and h.

        Args:
            weights: Weights of the layer.

        Returns:
            Scales [E] each, or None if they are dynamic.
        """
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
        shape = CallShape(self.config, min(num_tokens, MOST))
        h = WorkspaceSpec("h", (shape.pairs, padded(self.config.intermediate_size)), shape.wide)
        # other calls may quantize h in the epilogue that produces it, so the base class may declare no unquantized h
        others = tuple(spec for spec in found if spec.name != "h")
        rows = (spec.shape[0] for spec in found if spec.name == "h")
        return *others, replace(h, shape=(max(shape.pairs, *rows), h.shape[1]))
