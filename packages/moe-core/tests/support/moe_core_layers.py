"""Small layers of every installed scheme, found through the registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from moe_core import FusedMoEConfig, FusedMoELayer, MoEWeights, QuantKey, RoutingConfig, registry
from moe_core.interface.claims import expand_key
from moe_core.spec.quant_key import key_name
from moe_core.testing.data import make_weights


@dataclass(frozen=True)
class Kind:
    """A scheme with one pair of the keys that its torch backend claims."""

    scheme: str
    weight_key: QuantKey | None
    activation_key: QuantKey | None

    def __str__(self) -> str:
        return "-".join((self.scheme, key_name(self.weight_key), key_name(self.activation_key)))

    def config(self, **changes: Any) -> FusedMoEConfig:
        """A layer small enough for a test, whose sizes every group divides."""
        sizes: dict[str, Any] = {"num_experts": 6, "top_k": 2, "hidden_size": 256, "intermediate_size": 128}
        return FusedMoEConfig(**sizes | {"routing": RoutingConfig()} | changes)

    def weights(self, config: FusedMoEConfig, seed: int = 0) -> MoEWeights:
        """Random canonical weights."""
        return make_weights(config, self.weight_key, self.activation_key, seed=seed)

    def layer(self, seed: int = 0, **changes: Any) -> FusedMoELayer:
        """A layer of its own weights, on the CPU, with a router."""
        config = self.config(**changes)
        generator = torch.Generator().manual_seed(seed)
        router = torch.randn(config.num_experts, config.hidden_size, generator=generator) / 16
        return FusedMoELayer.from_weights(
            self.scheme, config, self.weights(config, seed), router_weight=router, copy=True
        )


def all_kinds() -> list[Kind]:
    """Of every scheme, a key of each pair of patterns that its torch backend claims."""
    found = []
    for scheme in registry().scheme_names():
        torch_backend = next(backend for backend in registry().oracle(scheme).table() if backend.name == "torch")
        for experts in torch_backend.load():
            found += [Kind(scheme, expand_key(w)[0], expand_key(a)[0]) for w, a in experts.claims.keys]
    return list(dict.fromkeys(found))


def some_kinds(each: int = 1) -> list[Kind]:
    """Of every scheme, so many kinds, spread over those that there are."""
    found = []
    for scheme in registry().scheme_names():
        kinds = [kind for kind in all_kinds() if kind.scheme == scheme]
        found += kinds[:: max(1, len(kinds) // each)][:each]
    return found
