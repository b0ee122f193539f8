"""The base of experts whose weights are widened in registers.  Importing this imports no Triton."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_core.gemm.experts import GroupedExperts
from moe_core.gemm.plan import TilePlan
from moe_core.weights import KernelWeights
from moe_core.workspace import WorkspaceSpec

if TYPE_CHECKING:
    from moe_core.gemm.marlin.layer import Functions, MarlinMatrix
    from moe_core.gemm.marlin.rule import VectorPlan
    from moe_core.gemm.marlin.vector import VectorFunctions


class MarlinExperts(GroupedExperts):
    """Subclasses add claims, `convert` and the device functions of their element type."""

    @property
    @abstractmethod
    def functions(self) -> Functions:
        """The element type's device functions."""

    @abstractmethod
    def matrix(self, name: str, weights: KernelWeights, scales: Tensor, bias: Tensor | None) -> MarlinMatrix:
        """What the kernels get of ``name``, w13 or w2."""

    def vectors(self, matrix: MarlinMatrix) -> VectorFunctions | None:
        """What one token's products take of the element type, or None where tensor cores are ahead."""
        return None

    @property
    def gathered_columns(self) -> tuple[int, int]:
        """The most columns of x and of h that are gathered; 0 where none are."""
        return 0, 0

    def chosen_plan(self, num_tokens: int) -> TilePlan:
        from moe_core.gemm.marlin.rule import marlin_plan

        config = self.config
        return marlin_plan(
            num_tokens,
            config.top_k,
            config.num_experts,
            config.hidden_size,
            config.intermediate_size,
            bits=self._bits,
            gated=config.is_gated,
            split=self.shares_loops,
            capability=self.device_info.capability,
        )

    @property
    def _bits(self) -> int:
        return 8 if self.weight_key is not None and self.weight_key.dtype.bits == 8 else 4

    def vector_plan(self, num_tokens: int, on_gpu: bool = True) -> VectorPlan | None:
        """Launch parameters where so many tokens are multiplied without tensor cores."""
        from moe_core.gemm.marlin.rule import vector_plan

        if self.batched:
            return None
        config = self.config
        plan = vector_plan(
            num_tokens,
            config.top_k,
            config.num_experts,
            config.hidden_size,
            config.intermediate_size,
            bits=self._bits,
            gated=config.is_gated,
            capability=self.device_info.capability,
        )
        return plan if on_gpu or plan is None else replace(plan, pdl=False)

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        from moe_core.gemm.marlin.layer import marlin_workspaces

        config = self.config
        return marlin_workspaces(
            num_tokens,
            config.top_k,
            config.local_experts,
            config.hidden_size,
            config.intermediate_size,
            config.dtype,
            batched=self.batched,
            gathered=self.gathered_columns,
        )

    def fused_moe(self, x: Tensor, weights: KernelWeights, call: dict[str, Any]) -> None:
        from moe_core.gemm.marlin.layer import marlin_fused_moe
        from moe_core.gemm.marlin.vector import reads_vectors, vector_fused_moe

        scales = call.pop("w13_scale"), call.pop("w2_scale")
        biases = call.pop("w13_bias"), call.pop("w2_bias")
        w13 = self.matrix("w13", weights, scales[0], biases[0])
        w2 = self.matrix("w2", weights, scales[1], biases[1])
        plan = self.vector_plan(x.shape[-2], x.is_cuda)
        vectors = None if plan is None else self.vectors(w13)
        if vectors is not None and reads_vectors(x, w13, w2):
            vector_fused_moe(vectors, x, w13, w2, **call | {"plan": plan})
            return
        marlin_fused_moe(self.functions, x, w13, w2, **call)
