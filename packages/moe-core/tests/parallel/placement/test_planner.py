"""Plans against the best of all placements, what moves, what is refused; counts on the device."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_core import ConfigError, ExpertPlacement, TensorError
from moe_core.parallel.placement.load_recorder import ExpertLoadRecorder
from moe_core.parallel.placement.planner import plan_placement, rank_loads


def least(loads: Sequence[int], ep_size: int, slots: int) -> float:
    """The smallest load of a most loaded rank, over all placements."""
    held = list(itertools.combinations(range(len(loads)), slots))
    found = []
    for ranks in itertools.combinations_with_replacement(held, ep_size):
        replicas = Counter(itertools.chain(*ranks))
        if len(replicas) == len(loads):
            found.append(max(sum(loads[e] / replicas[e] for e in rank) for rank in ranks))
    return min(found)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Loads, ranks and slots that can be searched through."""
    ep_size, experts = draw(st.integers(2, 3)), draw(st.integers(2, 6))
    slots = draw(st.integers(-(-experts // ep_size), min(experts, -(-experts // ep_size) + 1)))
    return draw(st.lists(st.integers(0, 100), min_size=experts, max_size=experts)), ep_size, slots


@given(problem=problems())
def test_plans_are_near_the_best(problem: tuple[list[int], int, int]) -> None:
    """Within a third, the bound of longest processing time first; without replicas these small ones are the best."""
    loads, ep_size, slots = problem
    plan = plan_placement(loads, ep_size, slots=slots)
    assert [len(rank) for rank in plan.placement.ranks] == [slots] * ep_size
    assert sum(plan.loads) == pytest.approx(sum(loads))
    best = least(loads, ep_size, slots)
    bound = 1 if slots * ep_size == len(loads) else 4 / 3
    assert max(plan.loads) <= bound * best * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(
    loads=st.lists(st.floats(0, 1e6), min_size=8, max_size=24),
    ep_size=st.integers(2, 8),
    extra=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_plans_keep_experts_in_their_places(loads: list[float], ep_size: int, extra: int, seed: int) -> None:
    slots = min(-(-len(loads) // ep_size) + extra, len(loads))
    first = plan_placement(loads, ep_size, slots=slots)
    again = plan_placement(loads, ep_size, current=first.placement)
    assert (again.placement, again.moved) == (first.placement, 0)
    order = torch.randperm(len(loads), generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = [loads[e] for e in order]
    free = plan_placement(shuffled, ep_size, slots=slots)
    plan = plan_placement(shuffled, ep_size, current=first.placement)
    assert plan == plan_placement(shuffled, ep_size, current=first.placement)
    assert max(plan.loads) <= 1.05 * max(free.loads) * (1 + 1e-9)
    moved = [
        (new, old)
        for mine, before in zip(plan.placement.ranks, first.placement.ranks, strict=True)
        for new, old in zip(mine, before, strict=True)
        if new != old
    ]
    assert plan.moved == len(moved)
    # an expert that stays on its rank stays in its slot
    for mine, before in zip(plan.placement.ranks, first.placement.ranks, strict=True):
        assert all(mine.index(expert) == before.index(expert) for expert in set(mine) & set(before))


def test_a_small_change_moves_few_experts() -> None:
    generator = torch.Generator().manual_seed(0)
    loads = torch.rand(64, generator=generator).exp()
    now = plan_placement(loads, 8, slots=9)
    changed = loads.clone()
    changed[now.placement.ranks[0][0]] *= 4
    assert sum(rank_loads(now.placement, changed)) / 8 / max(rank_loads(now.placement, changed)) < 0.9
    plan = plan_placement(changed, 8, current=now.placement)
    assert plan.balance > 0.95
    assert 0 < plan.moved <= 72 // 4


def test_the_busiest_experts_are_replicated() -> None:
    plan = plan_placement([90, 10, 10, 10], 2, slots=3)
    assert [len(places) for places in plan.placement.replicas] == [2, 1, 1, 1] or plan.placement.max_replicas == 2
    assert len(plan.placement.replicas[0]) == 2
    assert plan_placement(torch.zeros(4), 2).balance == 1.0
    # 5 experts on 2 ranks: as many as the contiguous placement has
    assert [len(rank) for rank in plan_placement([1, 1, 1, 1, 1], 2).placement.ranks] == [3, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"counts": [1.0, float("nan")]}, r"\bcounts\b"),
        ({"counts": [1, -1]}, r"\bcounts\b"),
        ({"slots": 1}, r"\bslots\b"),
        ({"slots": 5}, "4 experts"),
        ({"slots": [1, 3]}, "differ"),
        ({"slots": [2, 2, 2]}, "slots .*3"),
        ({"current": ExpertPlacement.contiguous(3, 2)}, "3 experts"),
        ({"current": ExpertPlacement.contiguous(4, 2), "slots": 3}, "placement"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_placement(**{"counts": [1, 2, 3, 4], "ep_size": 2, **arguments})  # type: ignore[arg-type]


def test_recorded_loads_are_how_often_experts_are_chosen() -> None:
    recorder = ExpertLoadRecorder(2, 5, "cpu")
    ids = torch.randint(-1, 6, (50, 3), generator=torch.Generator().manual_seed(0))
    recorder.record(1, ids)
    recorder.record(1, ids.int()[:10])
    expected = torch.stack([(ids == expert).sum() + (ids[:10] == expert).sum() for expert in range(5)])
    assert torch.equal(recorder.counts[1], expected)
    assert not recorder.counts[0].any()
    recorder.decay(0.5)
    assert torch.equal(recorder.counts[1], expected // 2)
    recorder.decay(0)
    assert not recorder.counts.any()
    with pytest.raises(ConfigError, match="layer .*2"):
        recorder.record(2, ids)
    with pytest.raises(TensorError, match="topk_ids .*meta"):
        recorder.record(0, ids.to("meta"))
    with pytest.raises(ConfigError, match="factor is 2"):
        recorder.decay(2)


@pytest.mark.gpu
def test_replays_of_a_graph_count() -> None:
    recorder = ExpertLoadRecorder(1, 8, "cuda")
    ids = torch.randint(0, 8, (64, 2), device="cuda", dtype=torch.int32)
    recorder.record(0, ids)
    recorder.decay(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorder.record(0, ids)
    for _ in range(3):
        graph.replay()
    assert torch.equal(recorder.counts[0].cpu(), 3 * torch.bincount(ids.cpu().flatten(), minlength=8))
