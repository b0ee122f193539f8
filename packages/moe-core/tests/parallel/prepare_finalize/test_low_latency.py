"""Layers whose ranks write into each other's memory, all of them in this process, against the layer on one rank."""

from __future__ import annotations

import itertools
import json
import os
from types import SimpleNamespace

import pytest
import torch
from moe_core import ConfigError, FusedMoEConfig, FusedMoEParallelConfig
from moe_core.errors import CommunicationError, FallbackWarning, TensorError
from moe_core.interface.prepare_finalize import TokenRouting
from moe_core.kernels.launch.launch import observe, record
from moe_core.parallel.distributed import symmetric
from moe_core.parallel.prepare_finalize.all_gather import AllGatherPrepareAndFinalize
from moe_core.parallel.prepare_finalize.all_to_all import AllToAllPrepareAndFinalize
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.parallel.prepare_finalize.low_latency import LowLatencyPrepareAndFinalize
from moe_core.parallel.prepare_finalize.token_rows import Tokens
from moe_core.spec.device import DeviceInfo
from moe_core_exchange import routing
from moe_core_layers import all_kinds
from moe_core_pushing_ranks import outputs, ranks_of, start
from moe_core_rank_layers import Case, difference, inputs, placement_of, whole_output

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="all ranks are on the CPU, with kernels in Triton's interpreter; tests/test_gpu_ranks.py",
)

KINDS = {str(kind): kind for kind in all_kinds()}
#: 16 bits, and tokens as codes with scales per group (float32, e8m0) and per token
NAMES = (
    "wna16-kInt4Static32Asym-16-bit",
    "fp8-kFp8Static128BlockSym-kFp8Dynamic128Sym",
    "int8-kInt8StaticChannelSym-kInt8DynamicTokenSym",
    "mxfp4-kMxfp4Static-kMxfp8Dynamic",
)


@pytest.mark.parametrize(
    ("name", "tokens", "tp", "placement"),
    [
        (NAMES[0], (3, 0, 2, 1), 1, "replicated"),
        (NAMES[1], (2, 3, 0, 0), 1, "arbitrary"),
        (NAMES[1], (3, 0, 1, 2), 2, "replicated"),
        (NAMES[0], (1, 3), 2, "round_robin"),
        (NAMES[2], (1, 2, 3, 0), 1, "contiguous"),
        (NAMES[3], (3, 0, 0, 1), 1, "replicated"),
    ],
    ids=str,
)
def test_layers_give_what_they_give_on_one_rank(name, tokens, tp, placement):
    columns = (("max_num_tokens", 3), ("intermediate_size", 512))
    case = Case(KINDS[name], "low_latency", tokens, tp=tp, ep=4 // tp, placement=placement, changes=columns)
    world, kernels = ranks_of(case, room=3)
    weights = case.kind.weights(case.config)
    batches = inputs(case)
    expected = [whole_output(case, weights, batch) for batch in batches]
    previous = None
    for _ in range(3):  # the third call has the first one's buffer
        calls = [start(kernel, batches[parallel.dp_rank]) for parallel, kernel in zip(world, kernels, strict=True)]
        found = outputs(case, world, calls)
        for parallel, output in zip(world, found, strict=True):
            assert difference(output, expected[parallel.dp_rank], case) is None
        assert previous is None or all(map(torch.equal, previous, found))
        previous = found


@pytest.mark.parametrize(
    ("name", "tokens", "tp", "placement"),
    [
        (NAMES[1], (2, 5, 0, 1), 1, "replicated"),
        (NAMES[0], (3, 0, 1, 2), 2, "round_robin"),
        (NAMES[2], (1, 3, 0, 2), 1, "contiguous"),
    ],
    ids=str,
)
def test_an_all_to_all_into_others_memory_has_room_for_what_the_ranks_bring(name, tokens, tp, placement):
    columns = (("intermediate_size", 512),)
    case = Case(KINDS[name], "alltoall", tokens, tp=tp, ep=4 // tp, placement=placement, changes=columns)
    world, kernels = ranks_of(case, room=6)
    assert all(kernel.prepare_finalize.capturable for kernel in kernels)
    weights = case.kind.weights(case.config)
    batches = inputs(case)
    for keep in (6, 2, 6):  # of another number of tokens in every call
        given = [tuple(tensor[:keep] for tensor in batch) for batch in batches]
        counts = [len(batch[0]) for batch in given]
        calls = [start(kernel, given[p.dp_rank], counts) for p, kernel in zip(world, kernels, strict=True)]
        rows = {call._prepared.wait().hidden_states.shape[0] for call in calls}
        assert rows == {max(counts) * len(counts)}
        for parallel, output in zip(world, outputs(case, world, calls), strict=True):
            assert difference(output, whole_output(case, weights, given[parallel.dp_rank]), case) is None
        # one after another they share a buffer
        assert kernels[0].prepare_finalize._room._buffers[1][0].state.sum() == 0


@pytest.mark.parametrize("sizes", [(6, 1), (1, 6)])
def test_a_rank_that_begins_the_next_call_early_leaves_results_alone(sizes):
    case = Case(KINDS[NAMES[0]], "alltoall", (6, 6), ep=2)
    world, kernels = ranks_of(case, room=6)
    weights, batches = case.kind.weights(case.config), inputs(case)
    first, second = ([tuple(tensor[:size] for tensor in batch) for batch in batches] for size in sizes)
    counts, others = ([size] * 2 for size in sizes)
    calls = [start(kernel, given, counts) for kernel, given in zip(kernels, first, strict=True)]
    for call in calls:
        call.run_experts()
    calls[0].finish_tokens()
    early = start(kernels[0], second[0], others)  # its tokens are there before the other rank adds up
    calls[1].finish_tokens()
    late = start(kernels[1], second[1], others)
    for given, call in zip(first, calls, strict=True):
        assert difference(call._output, whole_output(case, weights, given), case) is None
    for given, output in zip(second, outputs(case, world, [early, late]), strict=True):
        assert difference(output, whole_output(case, weights, given), case) is None


def test_a_rank_that_does_not_come_to_an_all_to_all_is_named():
    case = Case(KINDS[NAMES[0]], "alltoall", (2, 1), ep=2)
    _, kernels = ranks_of(case, room=2, timeout=0.01)
    given = inputs(case)[0]
    assert start(kernels[0], given, [2, 1]).result().isnan().all()
    with pytest.raises(CommunicationError, match=r"ranks \[11\]"):
        start(kernels[0], given, [2, 1])


def test_two_calls_are_under_way_at_once():
    case = Case(KINDS[NAMES[1]], "low_latency", (2, 1), ep=2, changes=(("max_num_tokens", 2),))
    world, kernels = ranks_of(case, room=2)
    weights = case.kind.weights(case.config)
    first = inputs(case)
    second = [(-x, w, ids.flip(0)) for x, w, ids in first]
    started = [
        [start(kernel, given) for kernel, given in zip(kernels, batch, strict=True)] for batch in (first, second)
    ]
    with pytest.raises(ConfigError, match="2 calls"):
        start(kernels[0], first[0])
    for batch, calls in zip((first, second), started, strict=True):
        for given, output in zip(batch, outputs(case, world, calls), strict=True):
            assert difference(output, whole_output(case, weights, given), case) is None


def test_a_rank_that_does_not_come_is_named_by_the_next_call():
    case = Case(KINDS[NAMES[0]], "low_latency", (2, 1), ep=2, changes=(("max_num_tokens", 2),))
    _, kernels = ranks_of(case, room=2, timeout=0.01)
    given = inputs(case)[0]
    assert start(kernels[0], given).result().isnan().all()
    with pytest.raises(CommunicationError, match=r"ranks \[11\]"):
        start(kernels[0], given)
    with pytest.raises(CommunicationError, match="NaN"):
        kernels[0].prepare_finalize.check()


@pytest.mark.parametrize("all2all", ["low_latency", "alltoall"])
def test_a_rank_that_comes_too_late_gets_no_results_of_another_call(all2all):
    case = Case(KINDS[NAMES[0]], all2all, (2, 2), ep=2, changes=(("max_num_tokens", 2),))
    world, kernels = ranks_of(case, room=2, timeout=0.01)
    batches = inputs(case)
    for _ in range(2):  # rows of calls before are there
        outputs(case, world, [start(kernel, given, [2, 2]) for kernel, given in zip(kernels, batches, strict=True)])
    batches = [(-x.flip(0), weights, ids.flip(0)) for x, weights, ids in batches]
    assert start(kernels[0], batches[0], [2, 2]).result().isnan().all()
    assert start(kernels[1], batches[1], [2, 2]).result().isnan().all()
    with pytest.raises(CommunicationError, match=r"ranks \[10\]"):
        kernels[1].prepare_finalize.check()


def test_a_rank_that_missed_another_is_missed_by_all():
    case = Case(KINDS[NAMES[0]], "alltoall", (2, 2, 2), ep=3, changes=(("num_experts", 9),))
    world, kernels = ranks_of(case, room=2, timeout=0.01)
    batches, counts = inputs(case), [2, 2, 2]
    outputs(case, world, [start(kernel, given, counts) for kernel, given in zip(kernels, batches, strict=True)])
    first = start(kernels[0], batches[0], counts)
    third = start(kernels[2], batches[2], counts)
    assert first.result().isnan().all()  # the second one is late
    kernels[0].prepare_finalize._room._buffers[0][0].alarm.zero_()  # as in one graph: the host doesn't look
    assert start(kernels[0], batches[0], counts).result().isnan().all()
    second = start(kernels[1], batches[1], counts)  # before the third one's time is over
    third.run_experts()
    second.run_experts()
    for number, call in ((1, second), (2, third)):
        assert call.result().isnan().all()
        with pytest.raises(CommunicationError, match=r"ranks \[10\]"):
            kernels[number].prepare_finalize.check()


@pytest.mark.parametrize(("name", "all2all"), [*((name, "low_latency") for name in NAMES), (NAMES[1], "alltoall")])
def test_what_warming_up_records_is_what_calls_launch(name, all2all):
    case = Case(KINDS[name], all2all, (2, 1, 0), ep=3, changes=(("max_num_tokens", 2), ("num_experts", 9)))
    _, kernels = ranks_of(case, room=2, timeout=0.001)
    movement, found = kernels[0].prepare_finalize, []
    key = kernels[0].experts.activation_key if kernels[0].experts.takes_quantized else None

    def call(x, weights, ids):
        routing = TokenRouting(weights, ids, tokens_per_rank=[2, 1, 0])
        prepared = movement.prepare(x, routing, key)
        partial = torch.zeros(prepared.hidden_states.shape, dtype=x.dtype, device=x.device)
        movement.finalize(x.clone(), partial, prepared, routing, kernels[0].reduce)

    given = inputs(case)[0]
    with observe(found.append):
        call(*given)
    with record() as recorded:
        call(*(tensor.to("meta") for tensor in given))
    names = [one.name for one in recorded]
    assert names == ["dispatch_kernel", "wait_kernel", "return_kernel", "combine_kernel"]
    assert [one.compiled_for() for one in recorded] == [one.compiled_for() for one in found]


def test_more_tokens_than_the_config_says_are_refused():
    case = Case(KINDS[NAMES[0]], "low_latency", (3, 1), ep=2, changes=(("max_num_tokens", 2),))
    _, kernels = ranks_of(case, room=2)
    with pytest.raises(TensorError, match="hidden_states .*3"):
        start(kernels[0], inputs(case)[0])
    for _ in range(2):  # what was refused holds no buffer
        start(kernels[0], inputs(case)[1])


def test_what_it_can_not_do_is_said():
    parallel = FusedMoEParallelConfig.of_rank(0, ep_size=2, dp_size=2, all2all_backend="low_latency")
    config = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=256, intermediate_size=128, parallel=parallel)
    reasons = LowLatencyPrepareAndFinalize.unsupported_reasons(config, None, DeviceInfo.parse("cpu"))
    assert "needs sm80 or newer, device is cpu" in reasons
    assert any(reason.startswith("needs max_num_tokens") for reason in reasons)
    groups = SimpleNamespace(parallel=parallel, tokens="exchanged", among=str)
    with pytest.raises(ConfigError, match="max_num_tokens"):
        LowLatencyPrepareAndFinalize(config, groups)
    shared = "fp8-kFp8StaticTensorSym-kFp8DynamicTensorSym"
    case = Case(KINDS[shared], "low_latency", (2, 1), ep=2, changes=(("max_num_tokens", 2),))
    with pytest.raises(ConfigError, match=r"\bscale\b"):
        ranks_of(case, room=2)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_pack_for_an_all_to_all_what_torch_packs(name, monkeypatch):
    kind, copies = KINDS[name], 2
    parallel = FusedMoEParallelConfig.of_rank(3, tp_size=copies, ep_size=3, dp_size=6, all2all_backend="alltoall")
    placement = placement_of("replicated", 8, 3)
    config = kind.config(
        num_experts=8, top_k=3, parallel=parallel, num_local_experts=len(placement.ranks[parallel.ep_rank])
    )
    groups = SimpleNamespace(parallel=parallel, tokens="exchanged", among=str)
    movement = AllToAllPrepareAndFinalize(config, groups, placement=placement)
    monkeypatch.setattr(movement, "_numbers", lambda counts, *_: (counts.tolist(), [4] * 6))
    generator = torch.Generator().manual_seed(7)
    for tokens, adapters in itertools.product((0, 17), (False, True)):
        x = torch.randn(tokens, config.hidden_size, generator=generator).bfloat16()
        weights, ids = routing(tokens, 3, 8, generator, torch.int64)
        numbers = torch.arange(tokens, dtype=torch.int32) if adapters else None
        given = Tokens(x, None, weights, ids, numbers)
        by_kernels, by_torch = (
            pack(given, None, kind.activation_key) for pack in (movement._pack, movement._pack_torch)
        )
        assert by_kernels.left == by_torch.left
        assert torch.equal(by_kernels.places, by_torch.places)
        for one, other in zip(
            by_kernels.unpack(by_kernels.packed).parts(),
            by_torch.unpack(by_torch.packed).parts(),
            strict=True,
        ):
            assert one.dtype == other.dtype
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_kernels_pack_for_an_all_gather_what_torch_packs(name):
    kind = KINDS[name]
    parallel = FusedMoEParallelConfig.of_rank(1, ep_size=3, dp_size=3)
    placement = placement_of("replicated", 8, 3)
    config = kind.config(num_experts=8, top_k=3, parallel=parallel, num_local_experts=len(placement.ranks[1]))
    groups = SimpleNamespace(parallel=parallel, tokens="exchanged", among=str)
    movement = AllGatherPrepareAndFinalize(config, groups, placement=placement)
    generator = torch.Generator().manual_seed(7)
    for tokens, adapters in itertools.product((0, 17), (False, True)):
        x = torch.randn(tokens, config.hidden_size, generator=generator).bfloat16()
        weights, ids = routing(tokens, 3, 8, generator, torch.int64)
        numbers = torch.arange(tokens, dtype=torch.int32) if adapters else None
        given = Tokens(x, None, weights, ids, numbers)
        by_kernels, by_torch = (pack(given, kind.activation_key, 20) for pack in (movement._pack, movement._pack_torch))
        for (one, unpack), (other, unpack_other) in itertools.product((by_kernels, by_torch), repeat=2):
            # each takes what the other has packed
            parts, others = unpack_other(one).parts(), unpack(other).parts()
            for part, part_of_other in zip(parts, others, strict=True):
                assert part.dtype == part_of_other.dtype
                mine, its = (p[:tokens].contiguous().view(torch.uint8) for p in (part, part_of_other))
                assert torch.equal(mine, its)
            assert torch.equal(unpack(one).experts, unpack_other(other).experts)


def found_by(monkeypatch, mine, others):
    """`reasons_against` on rank 0, told what ``others`` are: (host, GPU, reasons)."""
    parallel = FusedMoEParallelConfig.of_rank(0, ep_size=2, dp_size=2, all2all_backend="low_latency")
    ranks = SimpleNamespace(members=[0, 1])
    groups = SimpleNamespace(parallel=parallel, tokens="exchanged", among=lambda _group=None: ranks)
    answers = [[json.dumps(said) for said in others], [json.dumps([])]]

    def exchange(_, text, what):
        return [text, *answers.pop(0)]

    monkeypatch.setattr(symmetric, "exchange", exchange)
    return groups, symmetric.reasons_against(groups, torch.device("cpu"), mine)


def test_ranks_decide_together_whether_they_share_memory(monkeypatch):
    host = symmetric.socket.gethostname()
    monkeypatch.setattr(symmetric, "_own_reasons", lambda device: [])
    assert found_by(monkeypatch, [], [(host, "another", [])])[1] == []
    hosts = found_by(monkeypatch, [], [("elsewhere", "another", [])])[1]
    assert len(hosts) == 1
    assert hosts[0].startswith("its ranks are on 2 hosts")
    assert found_by(monkeypatch, [], [(host, "cpu", [])])[1] == ["several ranks are on one GPU"]
    assert found_by(monkeypatch, [], [(host, "another", ["has a GPU older than sm_80"])])[1] == [
        "rank 1 has a GPU older than sm_80"
    ]
    monkeypatch.setattr(symmetric, "_reaches", lambda device, name: name != "another")
    assert found_by(monkeypatch, [], [(host, "another", [])])[1] == [
        "the GPU of rank 0 can't reach another rank's (no peer-to-peer access)"
    ]


def test_another_backend_takes_its_place(monkeypatch):
    reason = "needs sm80 or newer, device is cpu"
    groups, reasons = found_by(monkeypatch, [reason], [("elsewhere", "cpu", [reason])])
    assert reasons[0] == f"each rank {reason}"
    monkeypatch.setattr(symmetric, "reasons_against", lambda *_: reasons)
    config = FusedMoEConfig(
        num_experts=8, top_k=2, hidden_size=256, intermediate_size=128, parallel=groups.parallel, max_num_tokens=4
    )
    with pytest.warns(FallbackWarning, match="'low_latency'.*'allgather_reducescatter'"):
        made = default_prepare_finalize(config, groups, device=DeviceInfo.parse("cpu"))
    assert made.name == "allgather_reducescatter"


def test_multicast_is_off_while_memory_is_mapped(monkeypatch):
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    for before in (None, "0"):
        monkeypatch.delenv(name, raising=False) if before is None else monkeypatch.setenv(name, before)
        with symmetric._without_multicast():
            assert os.environ[name] == "1"
        assert os.environ.get(name) == before
