"""Layers over four ranks (Gloo, on the CPU) give what they give on one, with every all2all backend and placement."""

from __future__ import annotations

import itertools

from moe_core_layers import Kind, all_kinds
from moe_core_rank_layers import Case, run_cases
from moe_kit.ranks import run_ranks

BACKENDS = ("allgather_reducescatter", "alltoall")
#: in which ranks compute with the same numbers, however their columns are cut
CUT_EXACTLY = ("fp8-kFp8Static128BlockSym-kFp8Dynamic128Sym", "wna16-kInt4Static32Asym-16-bit")


def kinds() -> list[Kind]:
    """Every kind whose tokens don't share a scale that is found from them: it would span other batches too."""
    return [
        kind
        for kind in all_kinds()
        if kind.activation_key is None
        or kind.activation_key.is_static
        or not kind.activation_key.group_shape.is_per_tensor
    ]


def cases() -> list[Case]:
    """Every kind with some all2all backend and placement; some kinds with all."""
    found = []
    combinations = itertools.cycle(itertools.product(("arbitrary", "replicated", "contiguous"), BACKENDS))
    for kind, (placement, all2all) in zip(kinds(), combinations, strict=False):
        found.append(Case(kind, all2all, (3, 1, 0, 5), placement=placement))
    some = {str(kind): kind for kind in kinds()}
    for kind in (some[name] for name in CUT_EXACTLY):
        columns = (("intermediate_size", 512),)
        for all2all, placement in itertools.product(BACKENDS, ("contiguous", "round_robin", "replicated")):
            for tokens in ((4, 4, 4, 4), (0, 9, 0, 0), (2, 0, 7, 1)):
                found.append(Case(kind, all2all, tokens, placement=placement, counted=tokens[0] == 2))
            # tensor-parallel ranks that share their tokens, and that do not
            found.append(Case(kind, all2all, (3, 5), tp=2, ep=2, placement=placement, changes=columns))
            found.append(Case(kind, all2all, (3, 0, 1, 5), tp=2, ep=2, placement=placement, changes=columns))
        found += [Case(kind, all2all, (3, 0, 1, 5), tp=4, ep=1, changes=columns) for all2all in BACKENDS]
        for all2all, placement in itertools.product(("all_reduce", "reduce_scatter"), ("arbitrary", "replicated")):
            found += [Case(kind, all2all, (tokens,), placement=placement) for tokens in (0, 7, 8)]
            found.append(Case(kind, all2all, (5,), tp=2, ep=2, placement=placement, changes=columns))
            found.append(Case(kind, all2all, (5,), tp=4, ep=1, changes=columns))
        found += [
            Case(kind, all2all, (2, 3, 0, 1), changes=(("top_k", 1), ("apply_router_weight_on_input", True)))
            for all2all in BACKENDS
        ]
        found += [Case(kind, all2all, (2, 3, 0, 1), changes=(("batch_invariant", True),)) for all2all in BACKENDS]
        # which falls back to an all-gather here
        found.append(Case(kind, "low_latency", (2, 3, 0, 1), changes=(("max_num_tokens", 4),)))
    return found


def test_layers_over_ranks_give_what_they_give_on_one() -> None:
    wrong = [message for rank in run_ranks(run_cases, cases(), seconds=120) for message in rank]
    assert not wrong, "\n".join(wrong)
