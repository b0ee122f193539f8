"""Converted weights lie expert by expert, so that experts can be moved between ranks in any backend's layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_core import Environment, FusedMoEConfig, FusedMoEExperts, QuantKey, registry
from moe_core.interface.claims import expand_key
from moe_core.interface.effective import effective_weights
from moe_core.runtime.expert_mover import per_expert
from moe_core.selection.oracle import as_device_info
from moe_core.testing.data import make_weights

ORDER = torch.tensor([2, 0, 1])
CONFIG = FusedMoEConfig(num_experts=3, top_k=2, hidden_size=256, intermediate_size=256)
#: of all experts together, where a library takes one scale of x: ranks must have the same to exchange experts
SHARED = {"x_scale"}


def classes() -> list[tuple[str, type[FusedMoEExperts], QuantKey | None, QuantKey | None]]:
    """Every class of experts that some device here or elsewhere takes, with the first keys that it claims."""
    found = {}
    for scheme in registry().scheme_names():
        for backend in registry().oracle(scheme).table():
            for experts in backend.load():
                weight, activation = (expand_key(key)[0] for key in experts.claims.keys[0])
                found[experts] = (scheme, experts, weight, activation)
    return list(found.values())


@pytest.mark.parametrize(
    ("scheme", "experts", "weight_key", "activation_key"), classes(), ids=lambda value: getattr(value, "__name__", "")
)
def test_converted_weights_are_those_of_each_expert(
    scheme: str, experts: type[FusedMoEExperts], weight_key: QuantKey | None, activation_key: QuantKey | None
) -> None:
    """Experts in another order are converted to the same in that order, in slices that can be overwritten."""
    for device in map(as_device_info, ("cpu", "h200", "b200")):
        reasons = experts.claims.reasons_against(CONFIG, weight_key, activation_key, device, Environment())
        if all("not installed" in reason for reason in reasons):
            break
    weights = make_weights(CONFIG, weight_key, activation_key, seed=1)
    made = experts(CONFIG, weight_key=weight_key, activation_key=activation_key, device=device)
    ordered: dict[str, Any] = {name: tensor[ORDER].contiguous() for name, tensor in weights.tensors()}
    one = made.convert(effective_weights(made, weights))
    two = dict(made.convert(effective_weights(made, replace(weights, **ordered))).tensors())
    held = per_expert(one, 3)
    assert {"w13", "w2"} <= held.keys()
    for name, tensor in one.tensors():
        if name not in held:
            same = [other for other in held.values() if other.data_ptr() == tensor.data_ptr()]
            assert same or name in SHARED
            continue
        expected = tensor[ORDER].contiguous().view(-1).view(torch.uint8)
        assert torch.equal(two[name].contiguous().view(-1).view(torch.uint8), expected), name
