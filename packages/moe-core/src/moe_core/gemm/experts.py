"""What the experts of all schemes share that run on the grouped matrix product.

A subclass adds claims, `convert`, the rule's plan, its scratch memory and one call.  Importing this imports no Triton.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from moe_core.config import FusedMoEActivationFormat
from moe_core.errors import TensorError
from moe_core.experts import ExpertTokensMetadata, FusedMoEExpertsModular
from moe_core.gemm.plan import TilePlan
from moe_core.gemm.rule import quantizes_while_loading, tile_plan
from moe_core.lora import LoRA
from moe_core.weights import KernelWeights
from moe_core.workspace import WorkspaceSpec

if TYPE_CHECKING:
    from moe_core.gemm.rows_moe import ActivationScales, RowFunctions


class GroupedExperts(FusedMoEExpertsModular):
    """Standard and batched format; weights with ``w1_scale`` and ``w2_scale``."""

    launches_only = True

    @abstractmethod
    def chosen_plan(self, num_tokens: int) -> TilePlan:
        """The rule's choice for so many tokens, or rows T_max of each expert's buffer."""

    @abstractmethod
    def fused_moe(self, x: Tensor, weights: KernelWeights, call: dict[str, Any]) -> None:
        """Run the layer on ``x`` [M, K] (batched: [E, T_max, K]).

        ``call``: keywords that every fused layer of ``moe_core.gemm`` has: scales and biases of the weights, output,
        workspace, plan, activation, routing or numbers of rows, ``lora`` where there are adapters.
        """

    @property
    def batched(self) -> bool:
        return self.activation_format is FusedMoEActivationFormat.BATCHED

    @property
    def shares_loops(self) -> bool:
        """Whether several programs may share the k loop of a tile: parts have no place in the batched format."""
        return not self.batched

    @property
    def weight_on_input(self) -> bool:
        """Whether the experts weight x; in the batched format prepare has done it."""
        return self.config.apply_router_weight_on_input and not self.batched

    def plan(self, num_tokens: int, on_gpu: bool = True) -> TilePlan:
        """Launch parameters for so many tokens, or rows T_max of each expert's buffer."""
        plan = self.chosen_plan(num_tokens)
        if not self.shares_loops:
            plan = plan.unsplit()
        return plan if on_gpu else plan.interpreted()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weights: KernelWeights,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        workspace: Mapping[str, Tensor],
        expert_map: Tensor | None = None,
        hidden_states_scale: Tensor | None = None,
        expert_tokens: ExpertTokensMetadata | None = None,
        lora: LoRA | None = None,
    ) -> None:
        from moe_core.gemm.launch import Activation

        quant = weights.quant_config
        if quant.w1_scale is None or quant.w2_scale is None:
            raise TensorError("the quant config of quantised weights holds w1_scale and w2_scale")
        call: dict[str, Any] = {
            "w13_scale": quant.w1_scale,
            "w2_scale": quant.w2_scale,
            "w13_bias": quant.w1_bias,
            "w2_bias": quant.w2_bias,
            "out": output,
            "workspace": workspace,
            "plan": self.plan(hidden_states.shape[-2], hidden_states.is_cuda),
            "activation": Activation.of(self.config),
            "expert_map": expert_map,
            "apply_router_weight_on_input": self.weight_on_input,
        }
        if not self.batched:
            call |= {"topk_weights": topk_weights, "topk_ids": topk_ids}
        elif expert_tokens is None:
            raise TensorError("expert_tokens is missing: the batched format needs the rows in use per expert")
        else:
            call["expert_num_tokens"] = expert_tokens.expert_num_tokens
        if lora is not None:
            call["lora"] = lora
        self.fused_moe(hidden_states, weights, call)


class RowExperts(GroupedExperts):
    """Layers of `moe_core.gemm.rows_moe`: one-byte elements whose scales do not change along k."""

    #: of x and h in scratch memory
    element: ClassVar[torch.dtype]

    @property
    @abstractmethod
    def kind(self) -> str:
        """Of the activations' scales: "token", "tensor" or "static"."""

    @property
    @abstractmethod
    def functions(self) -> RowFunctions:
        """The element type's device functions."""

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of the activations' scales in scratch memory."""
        return torch.float32

    def activation_scales(self, weights: KernelWeights) -> ActivationScales:
        """With the static ones, where there are any."""
        from moe_core.gemm.rows_moe import ActivationScales

        return ActivationScales(self.kind, weights.quant_config.a1_scale, weights.quant_config.a2_scale)

    def extras(self, weights: KernelWeights) -> dict[str, Any]:
        """What `row_fused_moe` gets besides."""
        return {}

    def chosen_plan(self, num_tokens: int) -> TilePlan:
        config = self.config
        return tile_plan(
            num_tokens,
            config.top_k,
            config.num_experts,
            config.hidden_size,
            config.intermediate_size,
            gated=config.is_gated,
            capability=self.device_info.capability,
        )

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        from moe_core.gemm.workspaces import row_workspaces

        config = self.config
        return row_workspaces(
            self.element,
            num_tokens,
            config.top_k,
            config.local_experts,
            config.hidden_size,
            config.intermediate_size,
            config.dtype,
            kind=self.kind,
            weight_on_input=self.weight_on_input,
            batched=self.batched,
            scale=self.scale_dtype,
            lora=config if config.is_lora_enabled else None,
        )

    def fused_moe(self, x: Tensor, weights: KernelWeights, call: dict[str, Any]) -> None:
        from moe_core.gemm.rows_moe import row_fused_moe

        row_fused_moe(
            self.functions,
            x,
            weights.w13,
            weights.w2,
            activation_scales=self.activation_scales(weights),
            raw=quantizes_while_loading(self.device_info.capability),
            **self.extras(weights),
            **call,
        )
