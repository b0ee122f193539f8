"""Layers whose weights move between calls, as when an engine sleeps and wakes, compute with the present ones.

Where there is no GPU, interpreted kernels are recorded as if they had been compiled, and compute with the memory at the
addresses that they are started with.
"""

from __future__ import annotations

import random

import pytest
import torch
from moe_core.interface.experts import FusedMoEExperts
from moe_core_replayed_layers import ACTIONS, MovingLayers, random_sequence, replayed
from moe_core_replays import as_if_compiled


def layers_of(
    device: torch.device, experts: type[FusedMoEExperts], layers: int, monkeypatch: pytest.MonkeyPatch
) -> MovingLayers:
    made = MovingLayers(device, experts, layers, (1, 3))
    if device.type == "cpu":
        as_if_compiled(monkeypatch, computes=True)
    monkeypatch.setattr("moe_core.kernels.launch.replay._SHARED", {})
    made.forget()
    return made


@pytest.mark.diagonal(2)
@pytest.mark.diagonal(2)
@pytest.mark.parametrize("layers", [1, 2], ids=["alone", "alike"])
@pytest.mark.parametrize("experts", replayed())
def test_calls_in_any_order(
    device: torch.device, experts: type[FusedMoEExperts], layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = layers_of(device, experts, layers, monkeypatch)
    random_sequence(made, random.Random(layers), 5 if device.type == "cpu" else 100)


@pytest.mark.parametrize("experts", replayed())
def test_a_call_that_is_dispatched(device: torch.device, experts: type[FusedMoEExperts]) -> None:
    """What experts make of the weights at the first call, views of them too, is of the present memory."""
    made = MovingLayers(device, experts, 1, (3,))
    made.act("data", 0)
    made.call(0, 3)


@pytest.mark.diagonal(2)
@pytest.mark.diagonal(len(ACTIONS))
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("experts", replayed())
def test_a_kind_that_was_not_called_since_the_first_of_two_moves(
    device: torch.device, experts: type[FusedMoEExperts], action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = layers_of(device, experts, 1, monkeypatch)
    for tokens in (1, 1, 3, 3):
        made.call(0, tokens)
    for tokens in (3, 1, 1):
        made.act(action, 0)
        made.call(0, tokens)
    assert made.call(0, 1) or made.call(0, 1)
