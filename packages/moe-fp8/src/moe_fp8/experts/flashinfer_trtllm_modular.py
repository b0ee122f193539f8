"""FlashInfer's TRTLLM kernels, told which token goes where.

Ids become those of local experts before the call, so that any expert map works: see
`moe_core.libraries.trtllm_routing.declared_experts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_core import ExpertTokensMetadata, FusedMoEExpertsModular, KernelWeights
from moe_core.libraries_api import TRTLLM_MAX_LOCAL_EXPERTS, local_ids, trtllm_given_routing
from torch import Tensor

from moe_fp8.experts.flashinfer_trtllm import (
    BLOCK_CLAIMS,
    MXFP8_CLAIMS,
    TENSOR_CLAIMS,
    TrtLlmFp8BlockExperts,
    TrtLlmFp8Experts,
    TrtLlmFp8TensorExperts,
    TrtLlmMxfp8Experts,
)


class TrtLlmModular(TrtLlmFp8Experts, FusedMoEExpertsModular):
    """A call with ids and router weights."""

    def arguments(
        self,
        output: Tensor,
        inputs: dict[str, Tensor],
        weights: KernelWeights,
        *,
        topk_weights: Tensor,
        local_ids: Tensor,
    ) -> dict[str, Any]:
        """Arguments of the library's ``*_routed_moe``; looks at no value and needs no GPU."""
        return {
            "topk_ids": (local_ids, topk_weights),
            "routing_bias": None,
            **trtllm_given_routing(self.config),
            "intermediate_size": self.intermediate_size,
            "output": output,
            **inputs,
            **self.weight_arguments(weights),
            **self.activation_arguments(),
        }

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
    ) -> None:
        config = self.config
        ids = workspace["ids"][: topk_ids.numel()].view(topk_ids.shape)
        local_ids(topk_ids, config.local_experts, ids, none=config.local_experts, expert_map=expert_map)
        target = self.layer_output(output, workspace)
        inputs = self.quantized_input(hidden_states, weights, workspace)
        call = getattr(self.library(), f"{self.function}_routed_moe")
        call(**self.arguments(target, inputs, weights, topk_weights=topk_weights, local_ids=ids))
        if target is not output:
            output.copy_(target[:, : config.hidden_size])


class TrtLlmFp8TensorExpertsModular(TrtLlmModular, TrtLlmFp8TensorExperts):
    """Per tensor."""

    claims = replace(TENSOR_CLAIMS, max_experts=TRTLLM_MAX_LOCAL_EXPERTS)


class TrtLlmFp8BlockExpertsModular(TrtLlmModular, TrtLlmFp8BlockExperts):
    """Block FP8."""

    claims = replace(BLOCK_CLAIMS, max_experts=TRTLLM_MAX_LOCAL_EXPERTS)


class TrtLlmMxfp8ExpertsModular(TrtLlmModular, TrtLlmMxfp8Experts):
    """MXFP8."""

    claims = replace(MXFP8_CLAIMS, max_experts=TRTLLM_MAX_LOCAL_EXPERTS)
