"""vLLM's own MoE layers: made, filled and processed as its loader does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Sizes:
    """Experts, top-k, hidden size, intermediate size."""

    experts: int = E
    top_k: int = TOP_K
    hidden: int = K
    intermediate: int = N


SMALL = Sizes()

#: of a model's config, which there is none of here
mxfp4._user_moe_activation_override = lambda: None
#: one rank, without processes
parallel_state._TP = SimpleNamespace(world_size=1, rank_in_group=0)


def moe_config(
    sizes: Sizes = SMALL,
    *,
    activation: str = "silu",
    ep: tuple[int, int] = (1, 0),
    moe_backend: Any = "auto",
    device: str = "cpu",
    **others: Any,
) -> FusedMoEConfig:
    """A layer on rank ``ep[1]`` of ``ep[0]`` expert-parallel ones, whose experts are chosen for ``device``."""
    size, rank = ep
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.ep_size, parallel.ep_rank, parallel.use_ep = size, rank, size > 1
    values: dict[str, Any] = {
        "num_experts": sizes.experts,
        "experts_per_token": sizes.top_k,
        "hidden_dim": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_local_experts": sizes.experts // size,
        "num_logical_experts": sizes.experts,
        "moe_parallel_config": parallel,
        "activation": MoEActivation.from_str(activation),
        "in_dtype": torch.bfloat16,
        "device": device,
        "routing_method": RoutingMethodType.Renormalize,
        "moe_backend": moe_backend,
    }
    return FusedMoEConfig(**{**values, **others})


def make_layer(quant_config: Any, config: FusedMoEConfig | None = None, device: str = "cpu") -> RoutedExperts:
    """The layer with empty parameters on ``device``, its experts selected."""
    config = moe_config() if config is None else config
    with torch.device(device), set_current_vllm_config(VllmConfig()):
        manager = ExpertMapManager(
            max_num_batched_tokens=config.max_num_tokens,
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
    """Writes ``tensors`` into the parameters of those names, whose sizes vLLM may have rounded up for its kernels."""
    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        assert all(size >= given for size, given in zip(parameter.shape, tensor.shape, strict=True)), name
        assert parameter.dtype == tensor.dtype, (name, parameter.dtype, tensor.dtype)
        parameter.data[tuple(map(slice, tensor.shape))].copy_(tensor)


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


def copies(layer: RoutedExperts) -> list[str]:
    """The kernel's tensors that lie elsewhere than in the layer's parameters."""
    held = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    weights = experts_of(layer)._kernel.weights
    return [name for name, tensor in weights.tensors() if tensor.untyped_storage().data_ptr() not in held]


def calls(
    tokens: int, sizes: Sizes = SMALL, device: str = "cpu", seed: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, router weights, experts."""
    generator = torch.Generator(device).manual_seed(tokens if seed is None else seed)
    x = torch.randn(tokens, sizes.hidden, generator=generator, device=device).bfloat16()
    scores = torch.rand(tokens, sizes.experts, generator=generator, device=device)
    topk_weights, topk_ids = scores.topk(sizes.top_k)
    return x, topk_weights, topk_ids.to(torch.int32)
