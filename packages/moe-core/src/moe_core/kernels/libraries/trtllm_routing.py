"""Routing with FlashInfer's TRTLLM kernels: computed by the kernel, or given.

Kernels that route: the config determines the routing method, its groups, scaling factor and bias. If the library does
not apply the scaling factor for a method, the adapter applies it to the output. Under expert parallelism the library
assumes that a rank holds one contiguous range of experts. An expert map that violates this turns the output into NaN,
because reading the map on the host would wait for the device.

Kernels with given routing: ids are converted to local expert numbers before the call, so any expert map works.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_core.errors import ConfigError
from moe_core.interface.experts import ExpertTokensMetadata, FusedMoEExpertsModular, FusedMoEExpertsMonolithic
from moe_core.kernels.libraries.trtllm_experts import TrtLlmExperts
from moe_core.kernels.ops.align import local_ids
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.routing import RoutingMethodType
from moe_core.spec.weights import KernelWeights
from moe_core.spec.workspace import WorkspaceSpec

#: routing methods that the library's routing kernels support
TRTLLM_ROUTING_METHODS = frozenset(
    {
        RoutingMethodType.DeepSeekV3,
        RoutingMethodType.Renormalize,
        RoutingMethodType.RenormalizeNaive,
        RoutingMethodType.SigmoidRenorm,
        RoutingMethodType.Sigmoid,
        RoutingMethodType.MiniMax2,
    }
)
#: methods whose weights the library multiplies by the routed scaling factor
SCALED_METHODS = frozenset({RoutingMethodType.DeepSeekV3, RoutingMethodType.MiniMax2})
#: largest number of experts that one CTA routes among
MOST_EXPERTS = 512
#: largest number of local experts with given routing: some of 512 must be remote (:func:`declared_experts`)
TRTLLM_MAX_LOCAL_EXPERTS = 504


def declared_experts(config: FusedMoEConfig) -> int:
    """Return the number of experts to declare to a kernel with given routing.

    The number includes at least one remote expert, exceeds top-k, and is a multiple of 4. The library has no marker for
    "no expert" but supports remote experts: an id that selects no local expert becomes the first remote one.

    Args:
        config: Configuration of the layer.

    Returns:
        Number of experts.
    """
    most = max(config.local_experts, config.top_k) + 1
    return -(-most // 4) * 4


def trtllm_given_routing(config: FusedMoEConfig) -> dict[str, Any]:
    """Return the arguments of a kernel that takes local expert numbers and router weights.

    Args:
        config: Configuration of the layer.

    Returns:
        Keyword arguments by the library's names.
    """
    return {
        "num_experts": declared_experts(config),
        "top_k": config.top_k,
        "n_group": None,
        "topk_group": None,
        "local_expert_offset": 0,
        "local_num_experts": config.local_experts,
        "routed_scaling_factor": None,
        "routing_method_type": 1,  # ignored: the routing is given
    }


class TrtLlmRouting(TrtLlmExperts, FusedMoEExpertsMonolithic):
    """Base of adapters that route: limits, routing arguments, postprocessing of the output."""

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
        if experts > MOST_EXPERTS:
            reasons.append(f"routes among at most {MOST_EXPERTS} experts, got {experts}")
        if experts <= top_k:
            reasons.append(f"needs more experts than top_k {top_k}, got {experts}")
        if config.local_experts * config.parallel.ep_size != experts:
            reasons.append(
                f"needs the contiguous experts of a rank: {config.local_experts} of {experts} experts are local, "
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
        routing = self.routing_arguments(self.library_logits(router_logits), correction_bias)
        self.call(f"{self.function}_moe", output, hidden_states, weights, routing, workspace)
        self.finish(output, expert_map)

    def routing_arguments(self, router_logits: Tensor, correction_bias: Tensor | None) -> dict[str, Any]:
        """Return the routing by the library's names, without reading values or needing a GPU.

        Args:
            router_logits: Router logits [M, E].
            correction_bias: Per-expert bias [E].

        Returns:
            Keyword arguments.

        Raises:
            ConfigError: If the config has no routing.
        """
        config, routing = self.config, self.config.routing
        if routing is None:
            raise ConfigError(f"{type(self).__name__} is monolithic: it needs a routing in the config, got None")
        return {
            "routing_logits": router_logits,
            "routing_bias": correction_bias,
            "num_experts": config.num_experts,
            "top_k": config.top_k,
            "n_group": routing.num_expert_group if routing.is_grouped else self.ungrouped,
            "topk_group": routing.topk_group if routing.is_grouped else self.ungrouped,
            "local_expert_offset": config.parallel.ep_rank * config.local_experts,
            "local_num_experts": config.local_experts,
            "routed_scaling_factor": routing.routed_scaling_factor if routing.method in SCALED_METHODS else None,
            "routing_method_type": int(routing.method),
        }

    @staticmethod
    def library_logits(router_logits: Tensor) -> Tensor:
        """Convert logits to a dtype that the library reads: float32 or bfloat16.

        Args:
            router_logits: Router logits [M, E].

        Returns:
            The logits.
        """
        return router_logits if router_logits.dtype in (torch.float32, torch.bfloat16) else router_logits.float()

    def finish(self, output: Tensor, expert_map: Tensor | None) -> None:
        """Apply the scaling factor if the library does not; write NaN for an unsupported expert map.

        Args:
            output: Output [M, K], modified in place.
            expert_map: Local expert number of each global id.
        """
        routing = self.config.routing
        if routing is not None and routing.method not in SCALED_METHODS and routing.routed_scaling_factor != 1.0:
            output.mul_(routing.routed_scaling_factor)
        if expert_map is not None:
            output.masked_fill_(self.differs(expert_map), torch.nan)

    def differs(self, expert_map: Tensor) -> Tensor:
        """Report whether an expert map differs from this rank's contiguous range of experts.

        Args:
            expert_map: Local expert number of each global id.

        Returns:
            Bool [].
        """
        local = self.config.local_experts
        number = torch.arange(self.config.num_experts, dtype=torch.int32, device=expert_map.device)
        number -= self.config.parallel.ep_rank * local

        def known(ids: Tensor) -> Tensor:
            return torch.where((ids >= 0) & (ids < local), ids, -1)

        return (known(expert_map) != known(number)).any()


class TrtLlmRouted(TrtLlmExperts, FusedMoEExpertsModular):
    """Base of adapters that are given the routing."""

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        ids = WorkspaceSpec("ids", (num_tokens * self.config.top_k,), torch.int32)
        return (*super().workspaces(num_tokens), ids)

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
        ids = workspace["ids"][: topk_ids.numel()].view(topk_ids.shape)
        local = self.config.local_experts
        local_ids(topk_ids, local, ids, none=local, expert_map=expert_map)
        routing = self.routing_arguments(topk_weights, ids)
        self.call(f"{self.function}_routed_moe", output, hidden_states, weights, routing, workspace)

    def routing_arguments(self, topk_weights: Tensor, ids: Tensor) -> dict[str, Any]:
        """Return the routing by the library's names, without reading values or needing a GPU.

        Args:
            topk_weights: Router weights [M, k], float32.
            ids: Local expert numbers [M, k], int32; may be overwritten.

        Returns:
            Keyword arguments.
        """
        return {**trtllm_given_routing(self.config), "topk_ids": (ids, topk_weights), "routing_bias": None}
