"""Calls as engines make them are replayed: nothing of what they bring makes torch work among the launches.

Routers bring weights in 16 bits, ids as int64, and both as columns of wider tensors.  Where there is no GPU,
interpreted kernels are recorded as if they had been compiled; what is started then computes nothing.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from moe_core import FusedMoEKernel
from moe_core.interface.experts import FusedMoEExperts
from moe_core.kernels.launch.launch import Launch, observe
from moe_core_replayed_layers import called, replayed
from moe_core_replays import as_if_compiled, python_calls


@pytest.fixture
def recorded(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        as_if_compiled(monkeypatch)


@pytest.mark.diagonal(2)
@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("experts", replayed())
def test_whatever_routing_is_given_as(device: torch.device, experts: type[FusedMoEExperts], tokens: int) -> None:
    kernel, inputs = called(device, experts, tokens)
    for _ in range(3):
        weights = torch.cat((inputs.topk_weights.bfloat16(),) * 2, dim=1)[:, : inputs.topk_weights.shape[1]]
        ids = torch.cat((inputs.topk_ids.long(),) * 2, dim=1)[:, : inputs.topk_ids.shape[1]]
        kernel.apply(inputs.x.clone(), topk_weights=weights, topk_ids=ids)
    assert kernel._replay.reasons() == (None,)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("experts", replayed())
def test_the_host_does_little(device: torch.device, experts: type[FusedMoEExperts]) -> None:
    kernel, inputs = called(device, experts, 1)

    def call() -> None:
        kernel.apply(inputs.x, topk_weights=inputs.topk_weights, topk_ids=inputs.topk_ids)

    for _ in range(2):
        call()
    assert kernel._replay.reasons() == (None,)
    # on a GPU Triton makes two more calls for each launch than its stand-in, and some for every descriptor
    assert python_calls(call) <= (38 if device.type == "cpu" else 66)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("experts", replayed())
def test_layers_of_a_model_share_what_was_recorded(
    device: torch.device, experts: type[FusedMoEExperts], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third starts at its first call what the second launched, with its own weights."""
    layers = [called(device, experts, tokens) for _ in range(3)]
    inputs = layers[0][1]
    call = partial(FusedMoEKernel.apply, topk_weights=inputs.topk_weights, topk_ids=inputs.topk_ids)
    for number, (kernel, _) in enumerate(layers):
        for _, tensor in kernel.weights.tensors():
            tensor.copy_(tensor.view(torch.uint8).roll(number, 0).view(tensor.dtype))  # other experts
    expected = [call(kernel, inputs.x) for kernel, _ in layers]
    assert not torch.equal(expected[1], expected[2])
    if device.type == "cpu":
        as_if_compiled(monkeypatch, computes=True)
    monkeypatch.setattr("moe_core.kernels.launch.replay._SHARED", {})
    launched: list[Launch] = []
    for (kernel, _), result in zip(layers, expected, strict=True):
        kernel._register()  # without records
        launched.clear()
        with observe(launched.append):
            assert torch.equal(call(kernel, inputs.x), result)
    assert kernel._replay.reasons() == (None,)
    assert not launched
