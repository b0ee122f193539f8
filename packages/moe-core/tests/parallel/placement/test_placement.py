"""Placements as values: what is where, what is refused, as JSON, as tables for dispatch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_core import ConfigError
from moe_core.parallel.placement.placement import ExpertPlacement, load_placements, save_placements
from moe_core.parallel.placement.tables import ReplicaTables


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    """Any number of experts on any number of ranks, some on several."""
    experts, ranks = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    held: list[set[int]] = [set() for _ in range(ranks)]
    for expert in range(experts):
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].add(expert)
    for rank in held:
        rank |= set() if rank else {draw(st.integers(0, experts - 1))}
    return ExpertPlacement(experts, tuple(tuple(draw(st.permutations(sorted(rank)))) for rank in held))


def test_contiguous_and_round_robin() -> None:
    assert ExpertPlacement.contiguous(5, 2).ranks == ((0, 1, 2), (3, 4))
    assert ExpertPlacement.round_robin(5, 2).ranks == ((0, 2, 4), (1, 3))
    assert ExpertPlacement.contiguous(4, 1).ranks == ((0, 1, 2, 3),)
    with pytest.raises(ConfigError, match="3 experts .*ep_size"):
        ExpertPlacement.round_robin(3, 4)


def test_replicas_are_where_ranks_hold_them() -> None:
    placement = ExpertPlacement(3, ((0, 1), (2, 0)))
    assert placement.replicas == (((0, 0), (1, 1)), ((0, 1),), ((1, 0),))
    assert placement.max_replicas == 2
    assert placement.has_replicas
    assert placement.expert_map(1).tolist() == [1, -1, 0]
    assert not ExpertPlacement.contiguous(4, 2).has_replicas
    with pytest.raises(ConfigError, match=r"\brank 2 "):
        placement.expert_map(2)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (((0, 1), (3,)), "rank 1 .*expert 3"),
        (((0, 1), ("2",)), "rank 1 .*expert -1"),
        (((0, 1),), "expert 2"),
        (((0, 1, 2), ()), "rank 1 "),
        (((0, 1, 0), (2,)), "rank 0 .*twice"),
        ((), "ranks"),
        (3, "sequence"),
    ],
)
def test_what_is_no_placement_is_refused(ranks: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertPlacement(3, ranks)


@given(placement=placements())
def test_placements_come_back_from_json_and_repr(placement: ExpertPlacement) -> None:
    assert ExpertPlacement.from_json(json.loads(json.dumps(placement.to_json()))) == placement
    assert eval(repr(placement)) == placement


def test_layers_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    layers = {3: ExpertPlacement.contiguous(4, 2), 12: ExpertPlacement(2, ((0, 1), (1, 0)))}
    save_placements(path, layers)
    assert load_placements(path) == layers
    assert [file.name for file in tmp_path.iterdir()] == ["placement.json"]
    # as any file that this process makes: other users may read it where they may read those
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    (tmp_path / "link").symlink_to(path)
    save_placements(tmp_path / "link", {0: layers[3]})
    assert load_placements(path) == {0: layers[3]}
    for wrong, message in (
        ({-1: layers[3]}, "layer.*-1"),
        ({"3": layers[3]}, "layer.*'3'"),
        ({3: layers[3].to_json()}, "layer 3 .*ExpertPlacement"),
    ):
        with pytest.raises(ConfigError, match=message):
            save_placements(path, wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="written"):
        save_placements(tmp_path / "no" / "file", layers)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "other", "placement.json"]
    assert load_placements(path) == {0: layers[3]}
    for content, message in (
        ("{", "JSON"),
        ("[]", "object"),
        ("{}", "placements"),
        ("[" * 100_000, "nested"),
        ('{"version": true, "layers": {}}', "version True"),
        ('{"version": 1.0, "layers": {}}', "has version 1.0"),
        ('{"version": 1, "version": 1, "layers": {}}', "'version'"),
        (f'{{"version": 1, "layers": {{"{"9" * 5000}": 0}}}}', "index"),
        ('{"version": 1, "layers": {"00": {"num_experts": 1, "ranks": [[0]]}}}', "'00'"),
        ('{"version": 1, "layers": {"²": 0}}', "index"),
        ('{"version": 2, "layers": {}}', "version 2"),
        ('{"version": 1, "layers": {"a": 0}}', "'a'"),
        ('{"version": 1, "layers": {"5": {"num_experts": 2, "ranks": [[0]]}}}', "layer 5.*expert 1"),
        ('{"version": 1, "layers": {"5": {"ranks": [[0]]}}}', "layer 5"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            load_placements(path)
    # no number of experts that a file names takes memory for each
    with pytest.raises(ConfigError, match="expert 1 .*2147483645"):
        ExpertPlacement.from_json({"num_experts": 2**31 - 1, "ranks": [[0]]})
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        load_placements(tmp_path / "nowhere.json")


@given(placement=placements(), tokens=st.integers(0, 9), offset=st.integers(0, 4), room=st.integers(0, 3))
def test_every_token_goes_to_one_replica_of_its_expert(
    placement: ExpertPlacement, tokens: int, offset: int, room: int
) -> None:
    tables = ReplicaTables.of(
        placement,
        "cpu",
        max_replicas=placement.max_replicas + room,
        stride=placement.max_local_experts + room,
    )
    ids = torch.randint(-1, placement.num_experts + 1, (tokens, 3), generator=torch.Generator().manual_seed(tokens))
    ranks, local = tables.choose(ids, offset=offset)
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            found = (int(ranks[token, slot]), int(local[token, slot]))
            if 0 <= expert < placement.num_experts:
                replicas = placement.replicas[expert]
                assert found == replicas[(token + offset) % len(replicas)]
            else:
                assert found == (-1, -1)
    # all ranks together take each of them once
    taken = torch.stack([tables.local_ids(ids, rank, offset=offset) for rank in range(placement.ep_size)])
    valid = (ids >= 0) & (ids < placement.num_experts)
    assert torch.equal((taken >= 0).sum(0), valid.long())


def test_tables_take_another_placement_in_place() -> None:
    tables = ReplicaTables.of(ExpertPlacement.contiguous(4, 2), "cpu", stride=3)
    places = tables.slots.data_ptr(), tables.counts.data_ptr()
    tables.copy_(ExpertPlacement(4, ((0, 1, 3), (2, 3, 0))))
    assert tables.slots.tolist() == [[0, 5], [1, 1], [3, 3], [2, 4]]
    assert tables.counts.tolist() == [2, 1, 1, 2]
    assert places == (tables.slots.data_ptr(), tables.counts.data_ptr())
    before = tables.slots.clone()
    for placement, message in (
        (ExpertPlacement.contiguous(4, 1), "4 experts"),
        (ExpertPlacement(3, ((0, 1), (2,))), "3 experts"),
        (ExpertPlacement(4, ((0, 1), (2, 0), (3, 0))), "3 replicas"),
    ):
        with pytest.raises(ConfigError, match=message):
            tables.copy_(placement)
    assert torch.equal(tables.slots, before)
