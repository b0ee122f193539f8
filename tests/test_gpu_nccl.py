"""Several GPUs on NCCL: sums over ranks with the same tokens, many tokens, calls that overlap, a rank that is gone."""

from __future__ import annotations

import pytest
import torch
from moe_core_gpu_nccl import missing, replayed, run_cases
from moe_core_layers import Kind, all_kinds
from moe_core_rank_layers import Case
from moe_kit.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: ranks of NCCL share none"),
]

#: of those that there are GPUs for
RANKS = [ranks for ranks in (2, 4) if ranks <= max(2, torch.cuda.device_count())]
BACKENDS = ("allgather_reducescatter", "alltoall")
LAYER = (("dtype", torch.bfloat16), ("intermediate_size", 512))


def kinds() -> list[Kind]:
    """One kind of every form in which tokens travel: in 16 bits, and as codes with one scale or several."""
    named = {str(kind): kind for kind in all_kinds()}
    return [
        named[name]
        for name in (
            "fp8-kFp8Static128BlockSym-kFp8Dynamic128Sym",
            "fp8-kFp8StaticChannelSym-kFp8DynamicTokenSym",
            "int8-kInt8StaticChannelSym-kInt8DynamicTokenSym",
            "mxfp4-kMxfp4Static-16-bit",
            "wna16-kInt4Static32Asym-16-bit",
        )
    ]


def cases(kind: Kind, ranks: int) -> list[Case]:
    found = []
    for all2all in BACKENDS:
        found += [
            Case(kind, all2all, tokens, ep=ranks, placement="replicated", changes=LAYER)
            for tokens in ((16,) * ranks, (700, 300, 1, 0)[:ranks])
        ]
        if kind.activation_key is None or kind.activation_key.group_size > 0:
            # scales of a whole row of h would span other columns
            found.append(Case(kind, all2all, (16,) * ranks, tp=2, ep=ranks // 2, changes=LAYER))
    for all2all in ("all_reduce", "reduce_scatter"):
        found += [
            Case(kind, all2all, (tokens,), ep=ranks, placement="replicated", changes=LAYER) for tokens in (1, 33, 700)
        ]
    return found


@pytest.mark.parametrize("kind", kinds(), ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_sums_and_overlapping_calls_over_gpus(ranks: int, kind: Kind) -> None:
    found = run_ranks(run_cases, cases(kind, ranks), ranks=ranks, backend="nccl", seconds=300)
    wrong = [message for rank in found for message in rank]
    assert not wrong, "\n".join(wrong)


def test_launches_of_ranks_that_add_up_are_replayed() -> None:
    case = Case(kinds()[0], "all_reduce", (8,), ep=2, changes=LAYER)
    for reasons in run_ranks(replayed, case, ranks=2, backend="nccl", seconds=120):
        assert reasons
        assert set(reasons) == {None}


@pytest.mark.parametrize("all2all", BACKENDS)
def test_a_rank_that_is_not_there_is_an_error_in_time(all2all: str) -> None:
    case = Case(kinds()[0], all2all, (8, 8), ep=2, changes=LAYER)
    (message, seconds), _ = run_ranks(missing, all2all, case, ranks=2, backend="nccl", seconds=60)
    assert message.startswith("CommunicationError: rank 0: ranks tell how many tokens they")
    assert "the time-out is 3 s" in message
    assert 2.5 < seconds < 6
