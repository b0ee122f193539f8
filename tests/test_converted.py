"""A kernel takes weights that were converted for its layer, and says what differs of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import moe_core as mc
import pytest
import torch
from moe_core.parallel.placement.placement import ExpertPlacement
from moe_core.selection.memory import layer_memory
from moe_core.testing.data import make_weights

CONFIG = mc.FusedMoEConfig(num_experts=4, top_k=2, hidden_size=256, intermediate_size=128)
KEYS = mc.kFp8Static128BlockSym, mc.kFp8Dynamic128Sym


def selected(**changes: Any) -> mc.Selection:
    weight_key, activation_key = KEYS
    config = replace(CONFIG, **changes)
    return mc.oracle("fp8").select(config, weight_key=weight_key, activation_key=activation_key, device="cpu")


def converted(selection: mc.Selection) -> mc.KernelWeights:
    return mc.oracle("fp8").convert(selection, make_weights(selection.config, *KEYS, seed=0))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"intermediate_size": 256}, "intermediate_size 128, selected 256"),
        ({"hidden_size": 512}, "hidden_size 256, selected 512"),
        ({"num_experts": 8, "num_local_experts": 8}, "local_experts 4, selected 8"),
    ],
)
def test_weights_of_another_layer(changes: dict[str, Any], difference: str) -> None:
    weights = converted(selected())
    with pytest.raises(mc.ConfigError, match=difference):
        mc.oracle("fp8").make_kernel(selected(**changes), weights)


def test_weights_of_the_same_layer_with_other_calls() -> None:
    weights = converted(selected())
    mc.oracle("fp8").make_kernel(selected(top_k=1), weights)
    # what was made otherwise is its maker's to know
    mc.oracle("fp8").make_kernel(selected(intermediate_size=256), replace(weights))


def test_a_placement_without_ranks() -> None:
    selection = selected()
    with pytest.raises(mc.ConfigError, match="groups="):
        mc.oracle("fp8").make_kernel(selection, converted(selection), placement=ExpertPlacement.round_robin(4, 2))


@pytest.mark.parametrize("tokens", [-1, 1.5])
def test_memory_of_what_is_no_number_of_tokens(tokens: Any) -> None:
    with pytest.raises(mc.ConfigError, match="num_tokens"):
        layer_memory(selected(), tokens)


def test_a_map_to_places_that_are_not_here() -> None:
    config = replace(CONFIG, num_local_experts=2)
    weights = make_weights(config, *KEYS, seed=0)
    for places in ([0, 1, -1, -1], [-1, -1, 1, 0]):
        mc.FusedMoELayer.from_weights("fp8", config, weights, expert_map=torch.tensor(places).int())
    with pytest.raises(mc.TensorError, match="expert_map .*2"):
        mc.FusedMoELayer.from_weights("fp8", config, weights, expert_map=torch.tensor([0, 1, 2, -1]).int())


def test_what_is_no_weights() -> None:
    with pytest.raises(mc.ConfigError, match=r"weights .*\bstr\b"):
        mc.oracle("fp8").make_kernel(selected(), "weights")  # type: ignore[arg-type]
