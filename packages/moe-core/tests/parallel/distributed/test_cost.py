"""The cost model on cases that were computed by hand; figures of machines: checked, written and read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from moe_core import ConfigError, FusedMoEConfig, FusedMoEParallelConfig, kFp8Dynamic128Sym, kFp8StaticTensorSym
from moe_core.parallel.distributed.cost import (
    ALL_GATHER,
    ALL_TO_ALL,
    MACHINES,
    PUSH,
    Kind,
    LayerCost,
    Line,
    Link,
    Machine,
    Peers,
    Step,
    fastest,
    forwarded,
    layer_cost,
    payload_bytes,
    ring,
)

#: 100 GB/s by NVLink, 10 GB/s by the network, one hop 1 µs and 5 µs; collectives attain all of it
ROUND = Machine(
    "round",
    domain=4,
    near=Link(100e9, 1e-6),
    far=Link(10e9, 5e-6),
    memory_bandwidth=1e12,
    rates={16: 1e14, 8: 2e14},
    kinds={name: Kind(0.0, 1.0) for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "push")},
    sync=0.0,
)


def config(
    tp: int = 1, ep: int = 1, dp: int = 1, *, experts: int = 8, top_k: int = 2, hidden: int = 1000, inter: int = 500
) -> FusedMoEConfig:
    parallel = FusedMoEParallelConfig(tp_size=tp, ep_size=ep, dp_size=dp)
    return FusedMoEConfig(experts, top_k, hidden, inter, parallel=parallel)


def compute(cost: LayerCost) -> float:
    assert cost.times is not None
    return cost.times[0]


def latency(cost: LayerCost) -> float:
    assert cost.times is not None
    return cost.times[1]


def transfer(cost: LayerCost) -> float:
    assert cost.times is not None
    return cost.times[2]


def cost_of(name: str, *arguments: Any, **named: Any) -> LayerCost:
    found = layer_cost(name, *arguments, **named)
    assert found is not None
    return found


def test_a_token_travels_with_its_dynamic_scales() -> None:
    assert payload_bytes(7168, 2, None) == 14336
    assert payload_bytes(7168, 2, kFp8Dynamic128Sym) == 7168 + 4 * 56
    assert payload_bytes(7000, 2, kFp8Dynamic128Sym) == 7000 + 4 * 55
    assert payload_bytes(7168, 2, kFp8StaticTensorSym) == 7168


def test_peers_of_groups_on_hosts() -> None:
    assert Peers.of(8, 1, 8) == Peers(8, 8)
    assert Peers.of(32, 1, 8) == Peers(32, 8)
    # every fourth rank: two of them on each host of eight
    assert Peers.of(8, 4, 8) == Peers(8, 2)
    assert Peers.of(4, 8, 8) == Peers(4, 1)
    assert (Peers(32, 8).domains, Peers(32, 8).far) == (4, 24)


def test_a_ring_passes_on_what_others_have() -> None:
    assert ring(ALL_GATHER, Peers(4, 4), 10.0) == Step(ALL_GATHER, 30.0, 0.0, 3, 0)
    # two domains of four: each of four adapters carries a quarter of the other domain's 40 bytes
    assert ring(ALL_GATHER, Peers(8, 4), 10.0) == Step(ALL_GATHER, 60.0, 10.0, 6, 1)
    assert ring(ALL_GATHER, Peers(1, 1), 10.0) == Step(ALL_GATHER, 0.0, 0.0, 0, 0)


def test_over_the_network_once_per_domain() -> None:
    # 2 domains of 2 ranks, a token goes to each rank with 1/2, to each domain with 3/4, 100 tokens of 10 bytes
    step = forwarded(ALL_TO_ALL, Peers(4, 2), 0.5, 0.75, 1000)
    # in both domains, one of two ranks is handed the tokens that the other has
    assert step == Step(ALL_TO_ALL, 2 * 0.5 * 1000, 0.75 * 1000, 1, 1)


def test_tensor_parallel_ranks_sum_up() -> None:
    cost = cost_of("all_reduce", config(tp=4), 100, ROUND)
    # a reduce-scatter and an all-gather of 100 * 1000 * 2 bytes in four parts
    assert (cost.dispatch_bytes, cost.combine_bytes) == (0, 2 * 3 * 50_000)
    assert transfer(cost) == pytest.approx(300_000 / 100e9)
    assert latency(cost) == pytest.approx(6e-6)
    half = cost_of("reduce_scatter", config(tp=4), 100, ROUND)
    assert (half.dispatch_bytes, half.combine_bytes) == (0, 3 * 50_000)
    nothing = cost_of("none", config(tp=4), 100, ROUND)
    assert (nothing.dispatch_bytes, nothing.combine_bytes, latency(nothing)) == (0, 0, 0)


def test_all_gather_and_reduce_scatter() -> None:
    cost = cost_of("allgather_reducescatter", config(ep=4, dp=4), 100, ROUND)
    assert cost.dispatch_bytes == 3 * 100 * (2000 + 16)
    assert cost.combine_bytes == 3 * 100 * 2000
    assert transfer(cost) == pytest.approx(300 * 4016 / 100e9)
    assert latency(cost) == pytest.approx(2 * 3e-6)


def test_all_to_all_sends_a_token_once_per_rank() -> None:
    cost = cost_of("alltoall", config(ep=4, dp=4), 100, ROUND, payload=kFp8Dynamic128Sym)
    hit = 1 - math.comb(6, 2) / math.comb(8, 2)  # 13 of 28 sets have one of a rank's two experts
    assert hit == pytest.approx(13 / 28)
    # codes and 8 scales of blocks of 128, and the routing of 2 slots
    assert cost.dispatch_bytes == pytest.approx(3 * hit * 100 * (1000 + 32 + 16))
    assert cost.combine_bytes == pytest.approx(3 * hit * 100 * 2000)
    assert latency(cost) == pytest.approx(2 * 1e-6)
    # between hosts 8 bytes to each rank say how much comes, and the host waits for them
    far = cost_of("alltoall", config(ep=8, dp=8), 100, replace(ROUND, sync=1e-3))
    assert far.before[0] == Step(ALL_TO_ALL, 3 * 8, 4 * 8, 0, 1, 1)
    assert latency(far) == pytest.approx(3 * 5e-6 + 1e-3)


def test_rows_that_exceed_the_cache_go_through_memory() -> None:
    machine = replace(ROUND, cache=1e6, memory_efficiency=0.5)
    # two ranks, to both of which every token goes
    cost, few = (cost_of("low_latency", config(ep=2, dp=2, top_k=8), tokens, machine) for tokens in (1000, 50))
    # 2000 bytes are read and 2 * 2064 written; results: 2 added to one
    there, back = cost.before[0].memory_bytes, cost.after[0].memory_bytes
    assert (there, back) == (1000 * (2000 + 2 * 2064), 1000 * 2000 * 3)
    assert transfer(cost) == pytest.approx(1000 * 4064 / 100e9 + (there + back - 2e6) / 0.5e12)
    assert transfer(few) == pytest.approx(50 * 4064 / 100e9)
    line = Line.of("low_latency", config(ep=2, dp=2, top_k=8), machine)
    assert line is not None
    assert line.at(1000) == pytest.approx(2e-6 + 1000 * 4064 / 100e9 + (there + back) / 0.5e12)


def test_batch_invariant_layers_bring_every_part_to_who_adds_it() -> None:
    parts = {tp: cost_of("all_reduce", replace(config(tp=tp), batch_invariant=True), 100, ROUND) for tp in (2, 4)}
    assert parts[2].combine_bytes == cost_of("all_reduce", config(tp=2), 100, ROUND).combine_bytes  # a + b = b + a
    assert (parts[4].combine_bytes, latency(parts[4])) == (3 * 200_000, pytest.approx(3e-6))
    back = cost_of("allgather_reducescatter", replace(config(ep=4, dp=4), batch_invariant=True), 100, ROUND).after
    assert back == (Step(ALL_TO_ALL, 3 * 100 * 2000, 0, 1, 0),)


def test_between_hosts_the_network_counts() -> None:
    cost = cost_of("low_latency", config(ep=8, dp=8), 100, ROUND)
    hit = 0.25  # one expert of eight per rank, two chosen
    near, far = 3 * hit * 100, 4 * hit * 100
    assert [step.near_bytes for step in (*cost.before, *cost.after)] == [near * 2016, near * 2000]
    assert [step.far_bytes for step in (*cost.before, *cost.after)] == [far * 2016, far * 2000]
    assert transfer(cost) == pytest.approx(far * 4016 / 10e9)
    assert latency(cost) == pytest.approx(2 * 5e-6)
    slow = replace(ROUND, kinds={PUSH: Kind(0.0, 1.0, 0.5)})
    assert transfer(cost_of("low_latency", config(ep=8, dp=8), 100, slow)) == pytest.approx(far * 4016 / 5e9)


def test_ranks_of_an_expert_parallel_rank_sum_what_they_share() -> None:
    cost = cost_of("allgather_reducescatter", config(tp=2, ep=2, dp=2), 100, ROUND)
    # two ranks with tokens of their own, on the same host of four, then an all-reduce of two
    assert cost.dispatch_bytes == 100 * 2016
    assert cost.combine_bytes == 100 * 2000 + 2 * 100_000


def test_the_share_of_the_experts() -> None:
    layer = config(ep=4, dp=4)
    few = cost_of("alltoall", layer, 1, ROUND, expert_bytes=1e6)
    many = cost_of("alltoall", layer, 10_000, ROUND, expert_bytes=1e6, product_bits=8)
    assert compute(few) == pytest.approx(2 * (1 - 0.75**4) * 1e6 / 1e12)
    # 40,000 tokens, 2 slots each, a quarter of them here; 3 matrices of 500 x 1000
    assert compute(many) == pytest.approx(2 * 20_000 * 1_500_000 / 2e14)
    parts = [compute(many), latency(many), transfer(many)]
    assert many.seconds == pytest.approx(sum(parts))
    assert many.overlapped == pytest.approx(max(parts[0], parts[2]) + parts[1])


def test_without_figures_bytes_alone() -> None:
    cost = cost_of("alltoall", config(ep=4, dp=4), 100, None)
    assert cost.combine_bytes > 0
    assert (cost.seconds, cost.overlapped) == (None, None)
    assert layer_cost("carrier_pigeon", config(ep=4, dp=4), 100, ROUND) is None


def test_what_is_fastest_from_how_many_tokens() -> None:
    lines = {"slow start": Line(10.0, 1.0), "quick": Line(1.0, 2.0), "never": Line(20.0, 3.0)}
    # equal at 9 tokens, from 10 on the other
    assert fastest(lines) == ((1, "quick"), (10, "slow start"))
    assert fastest({"one": Line(1.0, 1.0), "same": Line(1.0, 1.0)}) == ((1, "one"),)
    assert fastest({}) == ()
    assert fastest({"one": Line(1.0, 1.0 + 2**-50), "same": Line(2.0, 1.0)}) == ((1, "one"),)
    for tokens in range(1, 30):
        best = [name for start, name in fastest(lines) if start <= tokens][-1]
        assert lines[best].at(tokens) == min(line.at(tokens) for line in lines.values())


def test_all_to_all_wins_from_where_its_bytes_say_so() -> None:
    layer = config(ep=4, dp=4, experts=32, hidden=4096)
    line = {name: Line.of(name, layer, ROUND) for name in ("allgather_reducescatter", "alltoall")}
    assert all(line.values())
    lines = {name: found for name, found in line.items() if found is not None}
    # latencies are 6 and 2 µs and nothing else counts here: all-to-all from the first token
    assert fastest(lines) == ((1, "alltoall"),)
    hit = 1 - math.comb(24, 2) / math.comb(32, 2)
    assert lines["alltoall"].slope == pytest.approx(3 * hit * (8192 + 16 + 8192) / 100e9)


@pytest.mark.parametrize("ranks", [16, 32, 64, 128, 256])
def test_on_many_ranks_what_travels_stays_below_a_copy_per_expert(ranks: int) -> None:
    layer = config(ep=ranks, dp=ranks, experts=256, top_k=8, hidden=7168, inter=2048)
    direct, gathered = (cost_of(w, layer, 128, MACHINES["h200"]) for w in ("alltoall", "allgather_reducescatter"))
    assert direct.combine_bytes <= 8 * 128 * 7168 * 2
    assert gathered.combine_bytes == pytest.approx((ranks - 1) * 128 * 7168 * 2)


H200 = MACHINES["h200"]


@pytest.mark.parametrize("name", MACHINES)
def test_machines_survive_json(name: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(MACHINES[name].to_json()))
    assert Machine.load(str(path)) == MACHINES[name] == Machine.load(name)


def test_a_machine_is_found_by_its_gpu() -> None:
    assert Machine.of_device("NVIDIA H200") == H200
    assert Machine.of_device("h200") == H200
    assert Machine.of_device("NVIDIA A100-SXM4-80GB") == MACHINES["a100"]
    assert Machine.of_device("cpu") is None


def test_a_rate_of_operands_that_has_none_is_that_of_wider_ones() -> None:
    assert H200.rate(4) == H200.rate(8) == 1979e12
    assert H200.rate(16) == H200.rate(32) == 989e12


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"domain": 0}, "domain .*0"),
        ({"near": {"bandwidth": 0, "latency": 0}}, "near.bandwidth .*0"),
        ({"sync": -1}, r"\bsync\b"),
        ({"rates": {"8": 1.0}}, "16 bits"),
        ({"kinds": {"pigeon": {"call": 0, "efficiency": 1}}}, "'pigeon'"),
        ({"wings": 2}, "machine"),
        ({"near": 3}, "machine"),
    ],
)
def test_figures_that_cannot_be_are_refused(change: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Machine.from_json({**H200.to_json(), **change})


def test_files_that_hold_no_machine_are_named(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    with pytest.raises(ConfigError, match="machine.json"):
        Machine.load(str(path))
    path.write_text("{")
    with pytest.raises(ConfigError, match="machine.json"):
        Machine.load(str(path))
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"machine.json .*list"):
        Machine.load(str(path))
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"machine.json .*deeply"):
        Machine.load(str(path))
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"machine.json.* machine"):
        Machine.load(str(path))
    with pytest.raises(ConfigError, match="'h20o'"):
        Machine.load("h20o")
