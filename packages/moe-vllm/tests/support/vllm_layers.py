"""vLLM's own MoE layers, small, on the CPU: made, filled and processed as its loader does."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.oracle import mxfp4
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

E, TOP_K, K, N = 8, 2, 256, 128

#: of a model's config, which there is none of here
mxfp4._user_moe_activation_override = lambda: None
#: one rank, without processes
parallel_state._TP = SimpleNamespace(world_size=1, rank_in_group=0)


def moe_config(
    *, activation: str = "silu", ep: tuple[int, int] = (1, 0), moe_backend: Any = "auto", **others: Any
) -> FusedMoEConfig:
    """A layer on rank ``ep[1]`` of ``ep[0]`` expert-parallel ones."""
    size, rank = ep
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.ep_size, parallel.ep_rank, parallel.use_ep = size, rank, size > 1
    values: dict[str, Any] = {
        "num_experts": E,
        "experts_per_token": TOP_K,
        "hidden_dim": K,
        "intermediate_size": N,
        "num_local_experts": E // size,
        "num_logical_experts": E,
        "moe_parallel_config": parallel,
        "activation": MoEActivation.from_str(activation),
        "in_dtype": torch.bfloat16,
        "device": "cpu",
        "routing_method": RoutingMethodType.Renormalize,
        "moe_backend": moe_backend,
    }
    return FusedMoEConfig(**{**values, **others})


def make_layer(quant_config: Any, config: FusedMoEConfig | None = None) -> RoutedExperts:
    """The layer with empty parameters, its experts selected."""
    config = moe_config() if config is None else config
    with set_current_vllm_config(VllmConfig()):
        manager = ExpertMapManager(
            max_num_batched_tokens=64,
            top_k=config.experts_per_token,
            global_num_experts=config.num_experts,
            num_redundant_experts=0,
            num_expert_group=None,
            moe_parallel_config=config.moe_parallel_config,
            placement_strategy="linear",
            enable_eplb=False,
        )
        return RoutedExperts(
            "model.layers.0.mlp.experts",
            config.in_dtype,
            config,
            quant_config,
            manager,
            swiglu_limit=config.swiglu_limit,
        )


def fill(layer: RoutedExperts, tensors: Mapping[str, Tensor]) -> None:
    """Writes ``tensors`` into the parameters of those names."""
    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        assert parameter.shape == tensor.shape, (name, parameter.shape, tensor.shape)
        assert parameter.dtype == tensor.dtype, (name, parameter.dtype, tensor.dtype)
        parameter.data.copy_(tensor)


def process(layer: RoutedExperts) -> None:
    """What the loader does when all weights are there."""
    with set_current_vllm_config(VllmConfig()):
        layer.quant_method.process_weights_after_loading(layer)


def run(layer: RoutedExperts, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """A call through vLLM's method and modular kernel."""
    output: Tensor = layer.quant_method.apply(layer, x, topk_weights, topk_ids, None, None)
    return output


def experts_of(layer: RoutedExperts) -> Any:
    return layer.quant_method.moe_kernel.fused_experts
