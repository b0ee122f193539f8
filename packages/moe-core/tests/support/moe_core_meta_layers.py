"""Layers of meta tensors for a GPU that is not here, of every experts class on core's fused layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import moe_core as mc
from moe_core import FusedMoEKernel, LoRAWeights
from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import Environment
from moe_core.testing.meta_layers import key_pairs, meta_layer_weights

H200 = DeviceInfo.parse("h200")
SIZES: dict[str, Any] = {"num_experts": 32, "top_k": 6, "hidden_size": 2048, "intermediate_size": 768}


def grouped_experts() -> Iterator[type[GroupedExperts]]:
    seen = set()
    for oracle in mc.registry().oracles():
        for backend in oracle.table():
            for experts in backend.load():
                if issubclass(experts, GroupedExperts) and experts not in seen:
                    seen.add(experts)
                    yield experts


def layer_of(experts: type[GroupedExperts], **changes: Any) -> mc.FusedMoEConfig:
    layout = min(experts.claims.formats, key=lambda item: item != "standard")
    return mc.FusedMoEConfig(**SIZES | {"activation_format": layout} | changes)


def keys_on_h200(experts: type[GroupedExperts], config: mc.FusedMoEConfig) -> list[tuple[Any, Any]]:
    """The claimed keys that fit."""
    found = key_pairs(experts)
    return [keys for keys in found if not experts.unsupported_reasons(config, *keys, H200, Environment.current())]


def on_h200(
    experts: type[GroupedExperts], config: mc.FusedMoEConfig, keys: tuple[Any, Any] | None = None
) -> FusedMoEKernel:
    """A layer of meta tensors, with the first claimed keys by default."""
    weight_key, activation_key = keys_on_h200(experts, config)[0] if keys is None else keys
    made = experts(config, weight_key=weight_key, activation_key=activation_key, device=H200)
    lora = LoRAWeights.zeros(config, "meta") if config.is_lora_enabled else None
    return FusedMoEKernel(made, meta_layer_weights(made), default_prepare_finalize(config), lora=lora)


def experts_cases(**changes: Any) -> list[tuple[type[GroupedExperts], bool]]:
    """Experts, each alone, and every third that takes adapters with them."""
    found = [experts for experts in grouped_experts() if keys_on_h200(experts, layer_of(experts, **changes))]
    adapted = [
        experts for experts in found if keys_on_h200(experts, layer_of(experts, is_lora_enabled=True, **changes))
    ]
    return [*((experts, False) for experts in found), *((experts, True) for experts in adapted[::3])]
