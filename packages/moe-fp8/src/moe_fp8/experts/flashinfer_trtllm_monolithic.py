"""FlashInfer's TRTLLM kernels that route by themselves.

The routing method is the config's, as are its groups, scaling factor and bias.  Methods to which the library does not
apply the scaling factor have it applied to the output.  Under expert parallelism a rank holds one contiguous range of
experts, as the library assumes; an expert map that says otherwise turns the output into NaN, since reading it on the
host would wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from moe_core import (
    DeviceInfo,
    FusedMoEConfig,
    FusedMoEExpertsMonolithic,
    KernelWeights,
    QuantKey,
    RoutingMethodType,
    kMxfp8Static,
)
from moe_core.errors import ConfigError
from torch import Tensor

from moe_fp8.experts.flashinfer_trtllm import (
    BLOCK_CLAIMS,
    MXFP8_CLAIMS,
    SCALED_METHODS,
    TENSOR_CLAIMS,
    TrtLlmFp8BlockExperts,
    TrtLlmFp8Experts,
    TrtLlmFp8TensorExperts,
    TrtLlmMxfp8Experts,
    groups,
)

_METHODS = frozenset(
    {
        RoutingMethodType.DeepSeekV3,
        RoutingMethodType.Renormalize,
        RoutingMethodType.RenormalizeNaive,
        RoutingMethodType.SigmoidRenorm,
        RoutingMethodType.Sigmoid,
        RoutingMethodType.MiniMax2,
    }
)
#: experts that one block of threads routes among
_MOST = 512


class TrtLlmMonolithic(TrtLlmFp8Experts, FusedMoEExpertsMonolithic):
    """A call with router logits."""

    @classmethod
    def extra_reasons(
        cls,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        device: DeviceInfo,
    ) -> list[str]:
        reasons = []
        experts, top_k, routing = config.num_experts, config.top_k, config.routing
        if experts % 4:
            reasons.append(f"routes among a multiple of 4 experts, got {experts}")
        if experts > _MOST:
            reasons.append(f"routes among at most {_MOST} experts, got {experts}")
        if experts <= top_k:
            reasons.append(f"needs more experts than top_k {top_k}, got {experts}")
        if config.local_experts * config.parallel.ep_size != experts:
            reasons.append(
                f"needs the contiguous experts of a rank: {config.local_experts} of {experts} experts are here, "
                f"and ep_size is {config.parallel.ep_size}"
            )
        if routing is None:
            return reasons
        if routing.method is RoutingMethodType.DeepSeekV3:
            kept, most = routing.topk_group or 1, 8 if experts <= 384 else 22
            if top_k > most:
                reasons.append(f"routes DeepSeekV3 with top_k <= {most} among {experts} experts, got {top_k}")
            if kept > 4:
                reasons.append(f"routes DeepSeekV3 with topk_group <= 4, got {kept}")
            if top_k >= kept * experts // routing.groups:
                reasons.append(f"routes DeepSeekV3 with top_k below the experts of the groups taken, got {top_k}")
        return reasons

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
        config, routing = self.config, self.config.routing
        if routing is None:
            raise ConfigError(f"{type(self).__name__} routes by itself: the config needs a routing")
        scaled = routing.method in SCALED_METHODS
        return {
            "routing_logits": router_logits,
            "routing_bias": correction_bias,
            "num_experts": config.num_experts,
            "top_k": config.top_k,
            "intermediate_size": self.intermediate_size,
            "local_expert_offset": config.parallel.ep_rank * config.local_experts,
            "local_num_experts": config.local_experts,
            "routed_scaling_factor": routing.routed_scaling_factor if scaled else None,
            "routing_method_type": int(routing.method),
            "output": output,
            **groups(config, None if self.weight_key == kMxfp8Static else 0),
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
        if router_logits.dtype not in (torch.float32, torch.bfloat16):
            router_logits = router_logits.float()
        target = self.layer_output(output, workspace)
        inputs = self.quantized_input(hidden_states, weights, workspace)
        call = getattr(self.library(), f"{self.function}_moe")
        call(**self.arguments(target, inputs, weights, router_logits=router_logits, correction_bias=correction_bias))
        if target is not output:
            output.copy_(target[:, : self.config.hidden_size])
        routing = self.config.routing
        if routing is not None and routing.method not in SCALED_METHODS and routing.routed_scaling_factor != 1.0:
            output.mul_(routing.routed_scaling_factor)
        if expert_map is not None:
            output.masked_fill_(self.differs(expert_map), torch.nan)

    def differs(self, expert_map: Tensor) -> Tensor:
        """Bool []: whether ``expert_map`` is another than this rank's contiguous range of experts."""
        local = self.config.local_experts
        number = torch.arange(self.config.num_experts, dtype=torch.int32, device=expert_map.device)
        number -= self.config.parallel.ep_rank * local

        def known(numbers: Tensor) -> Tensor:
            return torch.where((numbers >= 0) & (numbers < local), numbers, -1)

        return (known(expert_map) != known(number)).any()


class TrtLlmFp8TensorExpertsMonolithic(TrtLlmMonolithic, TrtLlmFp8TensorExperts):
    """Per tensor."""

    claims = replace(TENSOR_CLAIMS, routing_methods=_METHODS)


class TrtLlmFp8BlockExpertsMonolithic(TrtLlmMonolithic, TrtLlmFp8BlockExperts):
    """Block FP8."""

    claims = replace(BLOCK_CLAIMS, routing_methods=_METHODS)


class TrtLlmMxfp8ExpertsMonolithic(TrtLlmMonolithic, TrtLlmMxfp8Experts):
    """MXFP8."""

    claims = replace(MXFP8_CLAIMS, routing_methods=_METHODS)
