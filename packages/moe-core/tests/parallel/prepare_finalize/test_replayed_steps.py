"""Steps of calls among ranks that repeat are replayed: the host does little between the kernels.

Interpreted kernels are recorded as if they had been compiled.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist
from moe_core import FusedMoEKernel, FusedMoEParallelConfig
from moe_core._support.async_result import AsyncResult
from moe_core.kernels.launch.launch import Launch, observe
from moe_core.kernels.launch.replay import Replay
from moe_core.parallel.placement.placement import ExpertPlacement
from moe_core.parallel.prepare_finalize.all_gather import AllGatherPrepareAndFinalize
from moe_core.parallel.prepare_finalize.destinations import Destinations
from moe_core.runtime.kernel_call import KernelCall
from moe_core.spec.workspace import Workspace
from moe_core_layers import all_kinds
from moe_core_pushing_ranks import ranks_of, start
from moe_core_rank_layers import Case, inputs, rank_parts
from moe_core_replays import as_if_compiled, python_calls

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="all ranks are on the CPU, with kernels in Triton's interpreter"
)

Batch: TypeAlias = tuple[torch.Tensor, ...]
ALL_GATHER = "allgather_reducescatter"
KIND = next(kind for kind in all_kinds() if str(kind) == "fp8-kFp8Static128BlockSym-kFp8Dynamic128Sym")


def gathering_ranks(case: Case) -> list[FusedMoEKernel]:
    """Kernels of ranks whose collectives bring each the tokens of its own, as often as there are ranks."""

    def begin(what: str, call: object, out: torch.Tensor, given: torch.Tensor) -> AsyncResult[None]:
        gathers = call is dist.all_gather_into_tensor
        return AsyncResult(lambda: out.copy_(given.repeat(case.dp, 1) if gathers else given[: len(out)]))

    kernels = []
    for rank in range(case.ep):
        parallel = FusedMoEParallelConfig.of_rank(rank, ep_size=case.ep, dp_size=case.dp)
        exchange = SimpleNamespace(
            members=[*range(case.ep)],
            size=case.ep,
            begin=begin,
            all_gather=lambda what, out, given: out.copy_(given.repeat(case.dp, 1)),
            reduce_scatter=lambda what, out, given: out.copy_(given[: len(out)]),
            on_gpus=True,
            shared=[None],
        )
        groups = SimpleNamespace(
            parallel=parallel, tokens="exchanged", among=lambda _group, exchange=exchange: exchange
        )
        oracle, selection, weights, placement = rank_parts(case, case.kind.weights(case.config), parallel)
        movement = AllGatherPrepareAndFinalize(selection.config, groups, placement=placement)
        kernels.append(FusedMoEKernel(oracle.make_experts(selection), weights, movement))
    return kernels


def ranks(all2all: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Case, list[FusedMoEKernel]]:
    """A layer over two ranks, each with a workspace as engines give it: descriptors hold its address."""
    changes = ("max_num_tokens", 2), ("intermediate_size", 128), ("dtype", torch.bfloat16)
    case = Case(KIND, all2all, (2, 2), ep=2, changes=changes, backend=("triton", "sm90"))
    if all2all == ALL_GATHER:
        monkeypatch.setattr("moe_core.kernels.ops._backend.use_triton", lambda *_: True)
        kernels = gathering_ranks(case)
    else:
        kernels = ranks_of(case, room=2, timeout=5.0)[1]
    for kernel in kernels:
        kernel.workspace = Workspace("cpu")
    return case, kernels


def called(kernels: list[FusedMoEKernel], batches: list[Batch]) -> tuple[list[torch.Tensor], int]:
    """(results, Python calls of the first rank) of a call of all ranks."""
    calls: list[KernelCall] = []
    host = 0
    for kernel, batch in zip(kernels, batches, strict=True):
        count = python_calls(lambda kernel=kernel, batch=batch: calls.append(start(kernel, batch, [2, 2])))
        host += count if len(calls) == 1 else 0
    host += python_calls(calls[0].run_experts)
    for call in calls[1:]:
        call.run_experts()
    host += python_calls(calls[0].result)
    return [call.result() for call in calls], host


def first_rank(all2all: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[FusedMoEKernel], Batch]:
    """Kernels and tokens of the first of two ranks; the other has always come, without tokens, and sends zeros."""
    case, kernels = ranks(all2all, monkeypatch)
    if all2all != ALL_GATHER:
        movement = kernels[0].prepare_finalize
        pool = (
            movement._buffers.buffers if all2all == "low_latency" else [pair[0] for pair in movement._room._buffers[:2]]
        )
        for buffer in pool:
            buffer.results.zero_()
            for step in (1, 2):
                buffer.signals(step)[1] = 2**30
    return kernels, inputs(case)[0]


@pytest.mark.parametrize(("all2all", "most"), [("low_latency", 70), ("alltoall", 76), (ALL_GATHER, 66)])
def test_the_host_does_little(all2all: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, (x, weights, ids) = first_rank(all2all, monkeypatch)
    as_if_compiled(monkeypatch)

    def call() -> None:
        kernels[0].apply(x, topk_weights=weights, topk_ids=ids, tokens_per_rank=[2, 2])

    for _ in range(3):
        call()
    assert kernels[0]._replay.reasons() == (None,)
    assert python_calls(call) <= most


@pytest.mark.parametrize(("all2all", "most"), [("low_latency", 193), ("alltoall", 215), (ALL_GATHER, 175)])
def test_the_host_does_little_in_steps(all2all: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, kernels = ranks(all2all, monkeypatch)
    as_if_compiled(monkeypatch)
    batches = inputs(case)
    for _ in range(3):
        host = called(kernels, batches)[1]
    assert kernels[0]._replay.reasons() == (None,)
    assert host <= most, host


@pytest.mark.parametrize("all2all", ["low_latency", "alltoall", ALL_GATHER])
def test_replayed_calls_compute_with_their_tensors(all2all: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, tokens = first_rank(all2all, monkeypatch)
    given = [tuple(part.roll(shift, 0) for part in tokens) for shift in (0, 1)]

    def call(batch: Batch) -> torch.Tensor:
        x, weights, ids = batch
        return kernels[0].apply(x, topk_weights=weights, topk_ids=ids, tokens_per_rank=[2, 2])

    expected = [call(batch) for batch in given]
    assert not torch.equal(*expected)
    as_if_compiled(monkeypatch, computes=True)
    launched: list[Launch] = []
    for batch, result in zip(3 * given, 3 * expected, strict=True):
        launched.clear()
        with observe(launched.append):
            assert torch.equal(call(batch), result)
    assert kernels[0]._replay.reasons() == (None,)
    # nothing of the last call was dispatched
    assert not launched


@pytest.mark.parametrize("all2all", ["low_latency", "alltoall"])
def test_replayed_steps_compute_with_the_tensors_of_their_call(all2all: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, kernels = ranks(all2all, monkeypatch)
    given = [[tuple(part.roll(shift, 0) for part in batch) for batch in inputs(case)] for shift in (0, 1)]
    expected = [called(kernels, batches)[0] for batches in given]
    as_if_compiled(monkeypatch, computes=True)
    launched: list[Launch] = []
    for batches, results in zip(2 * given, 2 * expected, strict=True):
        launched.clear()
        with observe(launched.append):
            found = called(kernels, batches)[0]
        assert all(map(torch.equal, found, results))
    # none of the last call was dispatched
    assert not launched


def test_copies_have_no_records_of_the_tables_that_they_are_copies_of() -> None:
    destinations = Destinations(ExpertPlacement.contiguous(4, 2), 0)
    device = torch.device("cpu")
    destinations._steps[device] = Replay(destinations.tables(device))
    copied = copy.deepcopy(destinations)
    assert not copied._steps
    assert destinations._steps
    assert copied.tables(device).slots.data_ptr() != destinations.tables(device).slots.data_ptr()
