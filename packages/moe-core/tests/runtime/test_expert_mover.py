"""Experts that move among four ranks (Gloo, on the CPU): outputs, bits and addresses, and moves that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_core import ExpertPlacement, registry
from moe_core.parallel.placement.moves import placement_steps
from moe_core_layers import some_kinds
from moe_core_moves import run_failures, run_graphs, run_moves
from moe_kit.ranks import run_ranks


@st.composite
def changes(draw: st.DrawFn) -> tuple[ExpertPlacement, ExpertPlacement]:
    """Two placements with the same numbers of experts on their ranks, with replicas or without."""
    experts, ep_size = draw(st.integers(2, 8)), draw(st.integers(1, 4))
    rooms = [draw(st.integers(1, experts)) for _ in range(ep_size)]
    rooms[0] = max(rooms[0], experts - sum(rooms[1:]))
    pair = []
    for _ in range(2):
        # each expert once where there is room, then others
        slots = iter(draw(st.permutations(range(experts))))
        held: list[tuple[int, ...]] = []
        for room in rooms:
            mine = [expert for _, expert in zip(range(room), slots, strict=False)]
            others = [expert for expert in draw(st.permutations(range(experts))) if expert not in mine]
            held.append((*mine, *others[: room - len(mine)]))
        pair.append(ExpertPlacement(experts, tuple(held)))
    return pair[0], pair[1]


@given(change=changes(), most=st.sampled_from((1, 2, None)))
def test_steps_lead_from_one_placement_to_another(
    change: tuple[ExpertPlacement, ExpertPlacement], most: int | None
) -> None:
    """Each is a placement, so that no expert is lost, and changes at most so many slots of a rank."""
    current, new = change
    steps = placement_steps(current, new, most)
    for step in steps:
        changed = [
            sum(old != put for old, put in zip(held, wanted, strict=True))
            for held, wanted in zip(current.ranks, step.ranks, strict=True)
        ]
        assert 0 < max(changed) <= (most or 8)
        for held, wanted in zip(current.ranks, step.ranks, strict=True):
            assert all(held.index(expert) == wanted.index(expert) for expert in set(held) & set(wanted))
        current = step
    assert [set(held) for held in current.ranks] == [set(held) for held in new.ranks]
    if most is None:
        assert len(steps) <= 1


def test_experts_move_while_the_layer_is_in_use() -> None:
    wrong = [message for rank in run_ranks(run_moves, some_kinds(), seconds=120) for message in rank]
    assert not wrong, "\n".join(wrong[:5])


def test_a_move_that_fails_loses_nothing(tmp_path: Path) -> None:
    kind = some_kinds()[0]
    registry().scheme(kind.scheme).write_quickstart(tmp_path)
    for rank, found in enumerate(run_ranks(run_failures, kind, str(tmp_path), seconds=60)):
        told = "CommunicationError: ep_rank 2 has no room for the experts that come; the placement stays as it was"
        nothing = "ConfigError: no experts are staged: call stage first, on all ranks"
        assert found.pop("bytes") > 0
        assert found.pop("no memory") == told
        assert (found.pop("nothing staged"), found.pop("discarded")) == (nothing, nothing)
        assert not found.pop("still")
        others = "0, 2, 3" if rank == 1 else "1"
        assert found.pop("differing").startswith(f"ConfigError: ep_rank {others} received another placement than")
        assert not found.pop("later")
        assert found.pop("map")
        assert found.pop("reloaded") is None
        if rank < 3:
            assert "ranks agree about the experts that are moved" in found.pop("missing")
            assert found.pop("seconds") < 4
            assert not found.pop("missing still")
        for text, start in zip(
            found.pop("named"),
            (
                "placement is [[0, 1], [2, 3], [4, 5], [6, 7]], expected an ExpertPlacement",
                "the placement is for 2 ranks, but ep_size is 4",
                "groups is FusedMoEParallelConfig(tp_size=1, ",
                "parallel is a moe_core.parallel.distributed.groups.ParallelGroups",
                "groups is FusedMoEParallelConfig(tp_size=1, ",
                "placement is [[0, 1], [2, 3], [4, 5], [6, 7]], expected an ExpertPlacement",
                "kernel is Moving, expected a FusedMoEKernel",
                "expert_map has shape [3], expected [8]",
                "expert_map has dtype torch.float32, expected torch.int32",
                *["placement is [[0, 1], [2, 3], [4, 5], [6, 7]], expected an ExpertPlacement"] * 2,
            ),
            strict=True,
        ):
            assert text.partition("Error: ")[2].startswith(start)
        for name, text in (
            ("experts", "ConfigError: the ranks hold (3, 2, 2, 2) experts, those of the other placement (2, 2, 2, 2)"),
            ("ranks", "ConfigError: the ranks hold (4, 4) experts, those of the other placement (2, 2, 2, 2)"),
            ("sizes", "ConfigError: the ranks hold (3, 2, 2, 2) experts, those of the other placement (2, 2, 2, 2)"),
            ("old", "ConfigError: the placement is ExpertPlacement("),
            ("placements", "ConfigError: the layer's ranks differ in the placement of experts: ExpertPlacement("),
            ("unmapped", "ConfigError: calls of this kernel pass an expert map"),
            ("shared", "ConfigError: the layer's ranks differ in x_scale of kernels: [3] torch.float32 "),
        ):
            assert found.pop(name).startswith(text), name
        assert not found


@pytest.mark.gpu
def test_captured_graphs_go_on_working_while_experts_move() -> None:
    """On two GPUs: experts are staged on a stream of their own between replays, and committed between two of them."""
    if torch.cuda.device_count() < 2:
        pytest.skip("experts move between GPUs: needs two")
    wrong = [message for rank in run_ranks(run_graphs, ranks=2, backend="nccl", seconds=300) for message in rank]
    assert not wrong, "\n".join(wrong)
