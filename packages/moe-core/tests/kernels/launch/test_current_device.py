"""What is launched goes to the GPU of its tensors, whichever is the current one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moe_core import FusedMoEConfig, FusedMoEKernel, oracle
from moe_core.kernels.launch import current_device, launch
from moe_core.kernels.launch.current_device import device_of, is_elsewhere
from moe_core.kernels.launch.replay import Replay
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.spec.quant_config import FUSED_MOE_UNQUANTIZED_CONFIG
from moe_core.spec.weights import KernelWeights
from moe_core.testing import make_inputs, make_weights


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices that were made the current one, on a machine whose current GPU is the first."""
    found: list[torch.device] = []
    now = [0]

    @contextlib.contextmanager
    def device(one: torch.device) -> Iterator[None]:
        found.append(one)
        before, now[0] = now[0], one.index
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(launch, "has_several_gpus", lambda: True)
    return found


def test_only_another_gpu_is_elsewhere(entered: list[torch.device]) -> None:
    assert is_elsewhere(torch.device("cuda", 1))
    assert not any(map(is_elsewhere, (torch.device("cuda", 0), torch.device("cpu"), torch.device("meta"))))


def test_arguments_lie_where_their_first_tensor_does() -> None:
    meta, cpu = torch.empty(1, device="meta"), torch.empty(1)
    assert device_of((1, None, (2.0, (meta,)), cpu)) == torch.device("meta")
    assert device_of((SimpleNamespace(base=meta), cpu)) == torch.device("meta")
    assert device_of((1, (), SimpleNamespace())) is None


def test_a_kernel_is_launched_on_the_device_of_its_tensors(
    entered: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    second = torch.device("cuda", 1)
    monkeypatch.setattr(launch, "device_of", lambda arguments: second)
    seen = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **keywords: seen.append(torch.cuda.current_device())

    launch.launch(Kernel(), (1,), torch.empty(1))
    assert (seen, entered, torch.cuda.current_device()) == ([1], [second], 0)


def test_a_record_is_started_on_the_device_of_the_weights(
    entered: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelWeights, "device", property(lambda self: torch.device("cuda", 1)))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weights = KernelWeights(w13=torch.ones(1), w2=torch.ones(1), quant_config=FUSED_MOE_UNQUANTIZED_CONFIG)
    seen = []
    for _ in range(2):
        Replay(weights).step(lambda: seen.append(torch.cuda.current_device()), ())
    assert (seen, len(entered), torch.cuda.current_device()) == ([1, 1], 2, 0)


@pytest.mark.gpu
def test_a_layer_runs_on_another_gpu_than_the_current_one() -> None:
    """Conversion and calls, bit for bit as on the first GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    config = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=256, intermediate_size=256, dtype=torch.bfloat16)
    selection = oracle("fp8").select(config, weight_key="kFp8Static128BlockSym", activation_key="kFp8Dynamic128Sym")
    weights = make_weights(config, selection.weight_key, selection.activation_key, seed=1)
    inputs, results = make_inputs(config, 16, seed=2), []
    for index in range(2):
        device = torch.device("cuda", index)
        made = selection.experts(config, weight_key=selection.weight_key, activation_key=selection.activation_key)
        kernel = FusedMoEKernel(made, made.convert(weights.to(device)), default_prepare_finalize(config))
        x, router, ids = (one.to(device) for one in (inputs.x, inputs.topk_weights, inputs.topk_ids))
        # dispatched, recorded, and replayed
        results += [kernel.apply(x, topk_weights=router, topk_ids=ids).cpu() for _ in range(4)]
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(result, results[0]) for result in results)


def test_nothing_is_entered_where_the_device_is_the_current_one(entered: list[torch.device]) -> None:
    for device in (torch.device("cuda", 0), torch.device("cpu"), None):
        with current_device.current(device):
            pass
    assert not entered
