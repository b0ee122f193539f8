"""Two streams whose calls share a workspace: each call gets what it would get alone."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from moe_core import FusedMoEConfig, FusedMoEKernel
from moe_core.interface.experts import FusedMoEExperts
from moe_core.testing.data import make_inputs
from moe_core_replayed_layers import called, replayed

CONFIG = FusedMoEConfig(num_experts=32, top_k=4, hidden_size=1024, intermediate_size=512)
CALLS = 150


class Shared:
    """A layer, inputs of several kinds and streams, and what each kind's call returns alone."""

    def __init__(self, experts: type[FusedMoEExperts], device: torch.device, tokens: tuple[int, ...]) -> None:
        self.kernel: FusedMoEKernel = called(device, experts, 1, CONFIG)[0]
        self.inputs = {(number, seed): make_inputs(CONFIG, number, seed=seed) for number in tokens for seed in (0, 1)}
        self.inputs = {kind: inputs.to(device) for kind, inputs in self.inputs.items()}
        self.expected = {kind: self.call(kind) for kind in self.inputs}
        torch.cuda.synchronize()
        self.streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]

    def call(self, kind: tuple[int, int]) -> torch.Tensor:
        given = self.inputs[kind]
        return self.kernel.apply(given.x, topk_weights=given.topk_weights, topk_ids=given.topk_ids)

    def check(self, results: list[tuple[tuple[int, int], torch.Tensor]]) -> None:
        torch.cuda.synchronize()
        wrong = [kind for kind, result in results if not torch.equal(result, self.expected[kind])]
        assert not wrong, f"{len(wrong)} of {len(results)} calls"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [(64,), (1, 3, 64, 300)], ids=["one size", "growing"])
@pytest.mark.parametrize("experts", replayed())
def test_calls_on_alternating_streams(
    experts: type[FusedMoEExperts], tokens: tuple[int, ...], device: torch.device
) -> None:
    shared, rng = Shared(experts, device, tokens), random.Random(1)
    if len(tokens) > 1:  # it grows again while the streams are in use
        shared.kernel.workspace = type(shared.kernel.workspace)(device)  # type: ignore[misc]
    results = []
    for number in range(CALLS):
        with torch.cuda.stream(shared.streams[number % 2]):
            torch.cuda._sleep(rng.randrange(1, 200_000))
            kind = rng.choice(list(shared.inputs))
            results.append((kind, shared.call(kind)))
    shared.check(results)


@pytest.mark.gpu
@pytest.mark.parametrize("experts", replayed())
def test_calls_of_threads(experts: type[FusedMoEExperts], device: torch.device) -> None:
    """A stream and a thread each, and two threads on one stream."""
    shared = Shared(experts, device, (1, 64))
    results: list[tuple[tuple[int, int], torch.Tensor]] = []
    failed: list[BaseException] = []

    def serve(number: int, stream: torch.cuda.Stream) -> None:
        rng = random.Random(number)
        try:
            with torch.cuda.stream(stream):
                for _ in range(CALLS):
                    kind = rng.choice(list(shared.inputs))
                    results.append((kind, shared.call(kind)))
        except BaseException as error:
            failed.append(error)

    streams = (*shared.streams[1:], shared.streams[1])
    threads = [threading.Thread(target=serve, args=item) for item in enumerate(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    shared.check(results)


@pytest.mark.gpu
@pytest.mark.parametrize("experts", replayed())
def test_a_graph_is_captured_between_calls_of_two_streams(experts: type[FusedMoEExperts], device: torch.device) -> None:
    """Neither the capture nor a fork within it waits for work outside; the calls afterwards are right."""
    if not experts.claims.cuda_graph:
        pytest.skip("is not captured")
    shared = Shared(experts, device, (1, 64))
    small, large = (1, 0), (64, 1)
    with torch.cuda.stream(shared.streams[1]):
        before = [(large, shared.call(large)) for _ in range(3)]
    graph, fork = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        captured = [(small, shared.call(small))]
        fork.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(fork):
            captured.append((large, shared.call(large)))
        captured.append((small, shared.call(small)))
        torch.cuda.current_stream().wait_stream(fork)
    with torch.cuda.stream(shared.streams[2]):
        after = [(large, shared.call(large)) for _ in range(3)]
    shared.check(before + after)
    for _ in range(3):
        graph.replay()
    shared.check(captured)
