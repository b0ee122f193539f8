"""Calls of layers over four ranks: kinds of experts, steps that overlap, moved experts, ranks that differ, or are gone.

The ranks are started once for all tests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import moe_core_rank_calls as programs
import pytest
from moe_core import ConfigError, FusedMoEConfig, FusedMoEParallelConfig
from moe_core.parallel.prepare_finalize.by_name import (
    default_prepare_finalize,
    load_prepare_finalize,
    prepare_finalize_of,
)
from moe_kit.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """Of each rank, what each program found."""
    return run_ranks(programs.every, seconds=90)


@pytest.mark.parametrize("program", ["kinds_of_experts", "same_tokens", "moving", "copies"])
def test_ranks_give_what_one_gives(ranks: list[dict[str, Any]], program: str) -> None:
    # they raise where outputs differ
    assert [found[program] for found in ranks] == [None] * 4


def test_steps_run_in_the_documented_order(ranks: list[dict[str, Any]]) -> None:
    three = ["dispatch", "dispatch", "experts", "combine", "dispatch", "experts", "combine", "experts", "combine"]
    one = ["dispatch", "shared experts", "experts", "combine", "next layer's weights"]
    for found in ranks:
        gathered, sent = found["steps"]
        assert gathered == one + three
        # experts are not asked where no token came
        assert [event for event in sent if event != "experts"] == [event for event in one + three if event != "experts"]


def test_layers_that_differ_are_named_at_the_start(ranks: list[dict[str, Any]]) -> None:
    for found in (each["disagreeing"] for each in ranks):
        for text, (what, common, odd) in zip(
            found[1:],
            (
                ("top_k", "2", "1"),
                ("num_experts", "6", "7"),
                ("hidden_size", "16", "32"),
                ("intermediate_size of tp_rank 0", "8", "24"),
                ("dtype", "torch.float32", "torch.bfloat16"),
                ("the placement of experts", str([list(r) for r in programs.SPREAD.ranks]), ""),
            ),
            strict=True,
        ):
            start = f"ConfigError: the layer's ranks differ in {what}: {common} on ranks 0, 1, 3; {odd}"
            assert text.startswith(start)
            assert "on rank 2; all ranks must make the same layer" in text
        assert found[0] == "nothing"


def test_a_rank_that_is_not_there_is_an_error_in_time(ranks: list[dict[str, Any]]) -> None:
    for rank, (found, seconds) in enumerate(each["missing"] for each in ranks):
        if rank == 1:
            continue
        for text, what in zip(found, ("ranks tell how many tokens they bring", "ranks tell how many"), strict=True):
            assert text.startswith(f"CommunicationError: rank {rank}: {what}")
            assert "among ranks [0, 1, 2, 3], and this did not end: another rank has died, hangs" in text
        assert seconds < 3


def test_what_does_not_fit_is_refused_before_anything_is_sent(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(each["unfit"] for each in ranks):
        for text, start in zip(
            found,
            (
                "ConfigError: groups has FusedMoEParallelConfig(",
                "ConfigError: the placement is of 6 experts on 3 ranks, the layer has 6 on 4",
                f"ConfigError: the placement has 2 experts on ep_rank {rank}, the layer's config has num_local",
                "ConfigError: all2all_backend is 'x', expected allgather_reducescatter or alltoall",
                "TensorError: tokens_per_rank is [1, 1] on this rank, and wrong on ranks 0, 1, 2, 3, expected [0, 1, 2",
                "TensorError: tokens_per_rank is [9, 9, 9, 9] on this rank, and wrong on ranks 0, 1, 2, 3",
                "ConfigError: AllReducePrepareAndFinalize adds partial sums of ranks with the same tokens: it needs",
                "ConfigError: AllToAllPrepareAndFinalize moves tokens between ranks: it needs process groups",
                f"ConfigError: expert_map says that ep_rank {rank} holds the experts {[*programs.MOVED.ranks[rank]]}",
                "nothing",
                "ConfigError: the new placement has 1 experts on ep_rank" if rank > 1 else "",
            ),
            strict=True,
        ):
            assert text.startswith(start), (text, start)


def test_a_batch_invariant_layer_gives_a_token_the_same_bits_with_every_backend(ranks: list[dict[str, Any]]) -> None:
    # they raise where bits differ
    for found in ranks:
        replicas, unclaimed = found["invariant"]
        assert replicas.startswith("ConfigError: the layer is batch invariant, and the placement has experts 1, 3 on")
        assert unclaimed == "ConfigError: Unclaimed does not claim batch invariance, which the layer requires"


def test_a_config_names_its_prepare_finalize() -> None:
    config = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=64, intermediate_size=32)

    def named(**sizes: object) -> str:
        parallel = FusedMoEParallelConfig.of_rank(0, **sizes)  # type: ignore[arg-type]
        return prepare_finalize_of(replace(config, num_local_experts=1, parallel=parallel)).name

    assert named() == "none"
    assert named(tp_size=2) == named(ep_size=4) == named(tp_size=2, ep_size=2) == "all_reduce"
    assert (
        named(tp_size=2, all2all_backend="alltoall") == named(ep_size=2, all2all_backend="all_reduce") == "all_reduce"
    )
    assert named(ep_size=2, tp_size=2, all2all_backend="reduce_scatter") == "reduce_scatter"
    with pytest.raises(ConfigError, match="all2all_backend .*'reduce_scatter'"):
        named(tp_size=2, all2all_backend="reduce_scater")
    assert named(ep_size=4, dp_size=4) == named(tp_size=4, dp_size=4) == "allgather_reducescatter"
    assert named(ep_size=2, tp_size=2, dp_size=2, all2all_backend="alltoall") == "alltoall"
    with pytest.raises(ConfigError, match="all2all_backend .*'alltoall'"):
        load_prepare_finalize("alltoal")
    for ep, tp in ((2, 1), (1, 2)):
        parallel = FusedMoEParallelConfig.of_rank(0, ep_size=ep, tp_size=tp, dp_size=2)
        with pytest.raises(ConfigError, match=rf"ep {ep}, .*prepare_finalize="):
            default_prepare_finalize(replace(config, num_local_experts=8 // ep, parallel=parallel))
