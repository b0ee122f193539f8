from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from moe_core import CheckpointError
from moe_core.api.models import PER_CALL, ModelSettings
from moe_core.checkpoint import LayerExperts, find_layer, load_stacked, read_layer
from moe_core.checkpoint.experts import stacks
from moe_core.checkpoint.experts.stacks import BadValuesError, ExpertStack, Query, load_together
from moe_core.checkpoint.experts.values import Values, checked
from moe_core.checkpoint.reader import Checkpoint
from moe_core_checkpoints import E, expert_tensors, layer_tensors, write
from torch import Tensor

CASES = Path(__file__).parents[4]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, bytes) of every call of the system that reads."""
    found: list[tuple[int, int]] = []
    original = os.preadv

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = original(descriptor, buffers, offset)
        found.append((offset, count))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return found


def ask(*suffixes: str, projections: Sequence[str]) -> Query[list[Tensor]]:
    found = []
    for suffix in suffixes:
        found.append((yield ExpertStack(projections, suffix)))
    return found


def layer_of(folder: Path, tensors: dict[str, Tensor]) -> LayerExperts:
    layer = find_layer(Checkpoint.open(write(folder, tensors)))
    layer.tensor(0, "up", "weight")  # opens the file
    return layer


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="this system has no preadv")
def test_what_is_asked_for_at_the_same_time_is_one_read(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    """w13 and w2 of an expert lie side by side: all bytes of the layer are one span of the file."""
    layer = layer_of(tmp_path / "c", expert_tensors(experts=64))
    reads.clear()
    asking = [ask("weight", projections=("gate", "up")), ask("weight", projections=("down",))]
    (w13,), (w2,) = load_together(layer, asking, experts=range(64), device="cpu")
    assert [count for _, count in reads] == [layer.nbytes]
    assert torch.equal(w13, load_stacked(layer, ("gate", "up"), "weight", experts=range(64), device="cpu"))
    assert torch.equal(w2, load_stacked(layer, ("down",), "weight", experts=range(64), device="cpu"))


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="this system has no preadv")
@pytest.mark.parametrize(
    ("case", "most"),
    [
        ("moe-fp8/tests/data/qwen3_hf_fp8_block", 2),
        ("moe-int8/tests/data/qwen3_ct_w8a8_int8", 2),
        ("moe-wna16/tests/data/qwen3_ct_w4a16_asym_g128", 4),
        ("moe-mxfp4/tests/data/gptoss_hf_mxfp4", 4),
    ],
)
def test_w13_and_w2_are_read_together(case: str, most: int, reads: list[tuple[int, int]]) -> None:
    """However many experts and projections: one read for each kind (weights, scales …); stacked ones may lie apart."""
    source = read_layer(Checkpoint.open(CASES / case), settings=ModelSettings(routing=PER_CALL))
    reads.clear()
    source.weights("cpu")
    assert len(reads) <= most


@pytest.mark.parametrize("nbytes", [1, 20_000], ids=["one by one", "a few at a time"])
@pytest.mark.parametrize("arrange", [None, lambda stored: stored.mT], ids=["as stored", "arranged"])
def test_those_that_ask_longer_go_on_alone(
    tmp_path: Path,
    nbytes: int,
    arrange: Callable[[Tensor], Tensor] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each gets what it would get by itself, whatever the others ask for and whenever they end."""
    tensors = expert_tensors(experts=9)
    for name in list(tensors):
        tensors[f"{name}_scale"] = tensors[name][:, :1].float() if "down" in name else tensors[name][:3].double()
    layer = layer_of(tmp_path / "c", tensors)
    monkeypatch.setattr(stacks, "GROUP_BYTES", nbytes)
    order: list[str] = []

    def asking(label: str, count: int, projections: Sequence[str]) -> Query[list[Tensor]]:
        found = []
        for suffix in ("weight", "weight_scale")[:count]:
            order.append(f"{label} {suffix}")
            found.append((yield ExpertStack(projections, suffix, arrange=arrange)))
        return found

    some = [8, 0, 3]
    for counts in ((1, 2), (2, 1), (2, 2), (0, 1), (0, 0)):
        order.clear()
        both = [asking("w13", counts[0], ("gate", "up")), asking("w2", counts[1], ("down",))]
        found = load_together(layer, both, experts=some, device="cpu")
        assert [len(own) for own in found] == [*counts]
        assert order == sorted(order, key=lambda what: what.endswith("scale"))
        for own, projections in zip(found, (("gate", "up"), ("down",)), strict=True):
            for tensor, suffix in zip(own, ("weight", "weight_scale"), strict=False):
                alone = load_stacked(layer, projections, suffix, experts=some, device="cpu", arrange=arrange)
                assert torch.equal(tensor, alone)


@pytest.mark.parametrize("projection", ["up", "down"])
@pytest.mark.parametrize("by", ["check", "arrange"])
def test_a_refusal_is_raised_where_it_was_asked_for(tmp_path: Path, projection: str, by: str) -> None:
    tensors = layer_tensors()
    name = f"model.layers.0.mlp.experts.2.{projection}_proj.weight"
    tensors[name][1, 3] = float("nan")
    layer = layer_of(tmp_path / "c", tensors)
    caught: list[str] = []

    def refuse(stored: Tensor) -> Tensor:
        if bool(stored.isnan().any()):
            raise BadValuesError("", 1, 1)
        return stored

    def asking(label: str, projections: Sequence[str]) -> Query[Tensor]:
        try:
            if by == "check":
                return (yield from checked(layer, projections, "weight", Values.FINITE))
            return (yield ExpertStack(projections, "weight", arrange=refuse))
        except CheckpointError as error:
            caught.append(label)
            raise CheckpointError(f"{label}: {error}") from None

    both = [asking("w13", ("gate", "up")), asking("w2", ("down",))]
    label = "w2" if projection == "down" else "w13"
    with pytest.raises(CheckpointError, match=f"{label}: {name if by == 'check' else ''}"):
        load_together(layer, both, experts=range(E), device="cpu")
    assert caught == [label]


def test_a_tensor_is_not_asked_for_twice_at_a_time(tmp_path: Path) -> None:
    layer = layer_of(tmp_path / "c", layer_tensors())
    both = [ask("weight", projections=("gate", "up")), ask("weight", projections=("up",))]
    with pytest.raises(ValueError, match="twice"):
        load_together(layer, both, experts=range(E), device="cpu")
