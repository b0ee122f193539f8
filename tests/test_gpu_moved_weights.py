"""Weights that move between calls, on a GPU: kernels for every number of tokens, descriptors, memory that is reused."""

from __future__ import annotations

import random

import pytest
import torch
from moe_core import FusedMoEConfig
from moe_core.interface.experts import FusedMoEExperts
from moe_core_replayed_layers import MovingLayers, random_sequence, replayed

CONFIG = FusedMoEConfig(num_experts=32, top_k=4, hidden_size=1024, intermediate_size=512)
#: vectors, short tiles, whole ones
TOKENS = (1, 3, 16, 64, 300, 1000)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layers", [1, 2], ids=["alone", "alike"])
@pytest.mark.parametrize("experts", replayed())
def test_calls_in_any_order(
    experts: type[FusedMoEExperts], layers: int, seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_core.kernels.launch.replay._SHARED", {})
    made = MovingLayers(device, experts, layers, TOKENS, CONFIG)
    made.forget()
    random_sequence(made, random.Random(seed), 60)
