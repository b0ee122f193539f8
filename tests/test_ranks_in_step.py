"""Ranks whose calls differ get an error, all of them, and go on with the next call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import moe_core_ranks_in_step as programs
import pytest
import torch
from moe_core.parallel.distributed import same_call
from moe_kit.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(programs.every, ranks=2, seconds=120)


def test_token_counts_that_differ_are_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for texts in found["counts"] + found["hosts"]["counts"]:
            *wrong, told, given, mixed = texts
            assert all(text.startswith("TensorError: tokens_per_rank is") for text in wrong), wrong
            assert [text.partition("wrong on ")[2].partition(", expected [3, 5]")[0] for text in wrong] == [
                "rank 0", "rank 0", "rank 0", "ranks 0, 1", "rank 0", "rank 1", "rank 0", "rank 1",
            ]  # fmt: skip
            assert (told, given, mixed) == ("same",) * 3


def test_calls_of_different_layers_are_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for first, then, second, last in found["layers"] + found["hosts"]["layers"]:
            for text in (first, second):
                assert text.startswith("CommunicationError: ranks tell")
                assert "calls of different layers" in text
            assert (then, last) == ("same", "same")
        assert "1 on rank 0, 2 on rank 1" in found["layers"][0][0]


def test_ranks_with_the_same_tokens_have_as_many(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for *wrong, right in found["shared tokens"]:
            assert [text.partition(" (")[2].partition(")")[0] for text in wrong] == [
                "3 on rank 0, 5 on rank 1",
                "0 on rank 0, 2 on rank 1",
                "2 on rank 0, 0 on rank 1",
            ]
            assert all(text.startswith("TensorError: hidden_states has different numbers of tokens") for text in wrong)
            assert right == "same"
        refused, right = found["scattered"]
        assert refused.startswith("TensorError: hidden_states has different numbers of tokens (4 on rank 0, 3 on")
        assert right == "True"


def test_layers_of_one_shape_and_other_names_are_refused_when_they_are_made(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        refused, made = found["names"]
        assert refused.startswith("ConfigError: the layer's ranks differ in the layer's name: layers.0 on rank 0; ")
        assert made == "nothing"


def test_consecutive_experts_need_no_map_where_groups_place_them(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        consecutive, others, by_hand = found["maps"]
        assert consecutive == "nothing"
        assert others.startswith("ConfigError: expert_map is missing")
        assert by_hand.startswith("TensorError: expert_map [6] is missing")


@pytest.mark.parametrize(("checking", "device"), [(True, "cuda"), (False, "cuda"), (False, "cpu")])
def test_ranks_with_the_same_tokens_are_compared_on_gpus_where_calls_are_checked(
    checking: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def tell(ranks: Any, numbers: list[int], what: str) -> list[list[int]]:
        told.append(numbers)
        return [numbers, numbers]

    monkeypatch.setattr(same_call, "checks_values", lambda: checking)
    monkeypatch.setattr(same_call, "tell", tell)
    ranks: Any = SimpleNamespace(members=[0, 1], on_gpus=device == "cuda")
    same_call.compare_same_tokens(ranks, 7, torch.empty(5, 8))
    assert told == ([[7, 5, 0]] if checking or device == "cpu" else [])
