"""FlashInfer's TRTLLM kernels that route by themselves: see `moe_core.libraries.trtllm_routing`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_core import KernelWeights, kMxfp8Static
from moe_core.libraries_api import TRTLLM_ROUTING_METHODS, TrtLlmRouting
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


class TrtLlmMonolithic(TrtLlmFp8Experts, TrtLlmRouting):
    """A call with router logits."""

    def arguments(
        self,
        output: Tensor,
        inputs: dict[str, Tensor],
        weights: KernelWeights,
        *,
        router_logits: Tensor,
        correction_bias: Tensor | None,
    ) -> dict[str, Any]:
        """Arguments of the library's ``*_moe``; looks at no value and needs no GPU."""
        ungrouped = None if self.weight_key == kMxfp8Static else 0
        return {
            "intermediate_size": self.intermediate_size,
            "output": output,
            **self.routing_arguments(router_logits, correction_bias, ungrouped=ungrouped),
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
        router_logits: Tensor,
        workspace: Mapping[str, Tensor],
        correction_bias: Tensor | None = None,
        expert_map: Tensor | None = None,
        hidden_states_scale: Tensor | None = None,
    ) -> None:
        logits = self.library_logits(router_logits)
        target = self.layer_output(output, workspace)
        inputs = self.quantized_input(hidden_states, weights, workspace)
        call = getattr(self.library(), f"{self.function}_moe")
        call(**self.arguments(target, inputs, weights, router_logits=logits, correction_bias=correction_bias))
        if target is not output:
            output.copy_(target[:, : self.config.hidden_size])
        self.finish(output, expert_map)


class TrtLlmFp8TensorExpertsMonolithic(TrtLlmMonolithic, TrtLlmFp8TensorExperts):
    """Per tensor."""

    claims = replace(TENSOR_CLAIMS, routing_methods=TRTLLM_ROUTING_METHODS)


class TrtLlmFp8BlockExpertsMonolithic(TrtLlmMonolithic, TrtLlmFp8BlockExperts):
    """Block FP8."""

    claims = replace(BLOCK_CLAIMS, routing_methods=TRTLLM_ROUTING_METHODS)


class TrtLlmMxfp8ExpertsMonolithic(TrtLlmMonolithic, TrtLlmMxfp8Experts):
    """MXFP8."""

    claims = replace(MXFP8_CLAIMS, routing_methods=TRTLLM_ROUTING_METHODS)
