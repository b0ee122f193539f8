"""Process groups of a layer's ranks: who is in them, what is refused, ranks that die or hang."""

from __future__ import annotations

import socket
from datetime import timedelta

import moe_core_ranks
import pytest
from moe_core import ConfigError, FusedMoEParallelConfig
from moe_core.parallel.distributed import ParallelGroups
from moe_core.spec.config import TokenSharing
from moe_kit.ranks import RankFailedError, run_ranks


def test_groups_of_four_ranks() -> None:
    for rank, found in enumerate(run_ranks(moe_core_ranks.groups)):
        ep_rank, tp_rank = divmod(rank, 2)
        assert found["parallel"] == FusedMoEParallelConfig(2, tp_rank, 2, ep_rank, 2, ep_rank)
        tp, ep = [2 * ep_rank, 2 * ep_rank + 1], [tp_rank, tp_rank + 2]
        assert found["members"] == [[0, 1, 2, 3], tp, ep, ep]
        assert found["total"] == sum(ep)
        assert found["gathered"] == ([0, 1, 2, 3], 40 * rank)
        assert found["mesh"] == ([0, 1, 2, 3], tp, ep, timedelta(seconds=5))
        assert found["pair"] == (tp, tp_rank, True)
        assert (found["own"], found["shared"], found["copy"]) == (True, True, True)
        # on Gloo, whatever this machine has
        assert found["gpus"] == ("", 0)
        for text, message in zip(
            found["refused"],
            (
                "ConfigError: process groups can't be pickled",
                "ConfigError: tp_size 3 x ep_size 1 = 3 ranks, but" if rank < 3 else "ConfigError: rank 3 is",
                "ConfigError: dp_size is 3, expected 1 or 4: the 4 ranks of the layer share one batch",
                *(
                    f"ConfigError: timeout is {limit}, expected a positive number"
                    for limit in (0, "'60'", "nan", "inf")
                ),
                "ConfigError: tp_size must be a positive integer, got '2'",
                "ConfigError: tp_size must be a positive integer, got None",
                "ConfigError: dp_size must be a positive integer, got '4'",
                "ConfigError: all2all_backend is None, expected a name",
                "ConfigError: dp_size must be a positive integer, got None",
                f"ConfigError: this process is rank {rank}, expected one of the layer's ranks",
                "ConfigError: the layer's ranks are [1, 0, 2, 3], expected ascending ones",
                "ConfigError: ranks is 4, expected ranks of torch's default process group: 0 to 3",
                "ConfigError: ranks is ['0'], expected ranks of torch's default process group: 0 to 3",
                "ConfigError: ranks is [0, 1, 2, 4], expected ranks of torch's default process group: 0 to 3",
                "ConfigError: backend is 'x', and torch has no 'x' here, expected gloo or nccl",
                "ConfigError: backend is 'nccl', and torch ",
                "ConfigError: the tp group has 4 ranks, of which this process is rank",
                "ConfigError: the mesh has dimensions ['pp', 'tp'], expected 'ep', 'tp' or one of them",
                "ConfigError: the layer's ranks are [0, 2, 1, 3], expected ascending ones",
            ),
            strict=True,
        ):
            assert text.startswith(message)


def test_ranks_stay_until_all_have_ended() -> None:
    """Others may still connect to one that has its result."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert run_ranks(moe_core_ranks.early, port, ranks=2) == [True, True]


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_silent_rank_is_an_error_in_time(how: str) -> None:
    (message, seconds), nothing = run_ranks(moe_core_ranks.silent, how, ranks=2, seconds=20, may_die=True)
    assert nothing is None
    assert message.startswith("CommunicationError: rank 0: sums are added among ranks [0, 1], and this did not end")
    assert "the time-out is 1 s" in message
    assert seconds < 3


def test_a_rank_that_makes_no_groups_is_missed_in_time() -> None:
    told = run_ranks(moe_core_ranks.late, ranks=2, seconds=20)[0]
    assert told.startswith("CommunicationError: rank 0: the process groups are made among ranks [0, 1], and this did")


def test_what_ranks_were_given_differently_is_named_with_their_numbers() -> None:
    for sizes, more, facts, nothing in run_ranks(moe_core_ranks.disagreeing, seconds=40):
        assert sizes == (
            "ConfigError: the layer's ranks differ in tp_size (and in ep_size): 1 on ranks 0, 1, 2; 2 on rank 3; all "
            "ranks must make the same layer"
        )
        # also where a rank alone would be refused
        assert more.startswith("ConfigError: the layer's ranks differ in tp_size: 3 on rank 0; 4 on ranks 1, 2, 3")
        assert facts.startswith(
            "ConfigError: the layer's ranks differ in top_k (and in placement): 2 on ranks 0, 1, 3;"
        )
        assert nothing == "nothing"


def test_ranks_of_tests_that_fail_are_named() -> None:
    with pytest.raises(RankFailedError, match=r"(?s)rank 1:.*ZeroDivisionError"):
        run_ranks(moe_core_ranks.failing, "raises", ranks=2)
    with pytest.raises(RankFailedError, match=r"\{1: 7\}"):
        run_ranks(moe_core_ranks.failing, "dies", ranks=2)
    with pytest.raises(RankFailedError, match=r"ranks \[1\]"):
        run_ranks(moe_core_ranks.failing, "hangs", ranks=2, seconds=1)


def test_a_layer_has_no_groups_without_a_process_group() -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        ParallelGroups.create()


def test_ranks_and_their_tokens() -> None:
    of_rank = FusedMoEParallelConfig.of_rank
    found = [of_rank(rank, tp_size=2, ep_size=2, dp_size=dp) for dp in (1, 2, 4) for rank in range(4)]
    assert [(p.rank, p.ep_rank, p.tp_rank, p.dp_rank) for p in found] == [
        (rank, rank // 2, rank % 2, (0, rank // 2, rank)[place]) for place in range(3) for rank in range(4)
    ]
    assert [p.token_sharing for p in found[::4]] == [TokenSharing.ALL, TokenSharing.EP_RANK, TokenSharing.NONE]
    assert of_rank(3, ep_size=4, dp_size=4).token_sharing is TokenSharing.NONE
    assert of_rank(3, tp_size=4, dp_size=4).token_sharing is TokenSharing.NONE
    assert of_rank(0).token_sharing is TokenSharing.ALL
    with pytest.raises(ConfigError, match="dp_size .*3"):
        _ = FusedMoEParallelConfig(2, 0, 3, 0, 2, 0).token_sharing
    with pytest.raises(ConfigError, match="dp_rank .*1"):
        _ = FusedMoEParallelConfig(dp_size=2, dp_rank=1, ep_size=2).token_sharing
    with pytest.raises(ConfigError, match=r"\brank 4 .*tp_size"):
        of_rank(4, tp_size=2, ep_size=2)
