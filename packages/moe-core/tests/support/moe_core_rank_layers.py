"""Layers over several ranks, as their tests run them: each rank makes its part, and all are compared with the whole."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from moe_core import (
    FusedMoEConfig,
    FusedMoEKernel,
    FusedMoELayer,
    FusedMoEParallelConfig,
    KernelWeights,
    MoEWeights,
    Oracle,
    Selection,
    registry,
    shard_layer,
)
from moe_core.interface.prepare_finalize import FusedMoEPrepareAndFinalizeModular
from moe_core.parallel.distributed import ParallelGroups
from moe_core.parallel.placement.placement import ExpertPlacement
from moe_core.parallel.prepare_finalize.by_name import REDUCTIONS, load_prepare_finalize
from moe_core_layers import Kind
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A layer of ``kind`` over ``tp * ep`` ranks.

    ``tokens``: how many each of the ``dp`` batches has; ``placement``: by name (:func:`placement_of`); ``all2all``: the
    name of the prepare/finalize class; ``counted``: ranks are told how many tokens there are; ``changes``: of the
    config; ``backend``: of experts, and for which device it is selected.
    """

    kind: Kind
    all2all: str
    tokens: tuple[int, ...]
    tp: int = 1
    ep: int = 4
    placement: str = "contiguous"
    counted: bool = False
    changes: tuple[tuple[str, Any], ...] = ()
    backend: tuple[str, str] = ("torch", "cpu")

    @property
    def dp(self) -> int:
        return len(self.tokens)

    @property
    def config(self) -> FusedMoEConfig:
        return self.kind.config(**{"num_experts": 8, "dtype": torch.float32, **dict(self.changes)})

    def __str__(self) -> str:
        return f"{self.kind} {self.all2all} tp{self.tp} ep{self.ep} {self.placement} {self.tokens} {self.changes}"


def placement_of(name: str, num_experts: int, ep: int) -> ExpertPlacement:
    """Contiguous, round_robin, arbitrary (uneven, in no order) or replicated (some experts on several ranks)."""
    if name in ("contiguous", "round_robin"):
        made: ExpertPlacement = getattr(ExpertPlacement, name)(num_experts, ep)
        return made
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(3)).tolist()
    bounds = [0, *(num_experts * (rank + 1) // ep - (1 if rank < ep - 1 else 0) for rank in range(ep))]
    ranks = [order[start:end] for start, end in itertools.pairwise(bounds)]
    if name == "replicated":
        for rank in range(ep):  # the first and the last expert are on all ranks
            ranks[rank] += [expert for expert in (order[0], order[-1]) if expert not in ranks[rank]]
    return ExpertPlacement(num_experts, tuple(map(tuple, ranks)))


def inputs(case: Case) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(x, topk_weights, topk_ids) of each batch; some ids are no expert's."""
    config, generator = case.config, torch.Generator().manual_seed(11)
    found = []
    for tokens in case.tokens:
        x = torch.randn(tokens, config.hidden_size, generator=generator).to(config.dtype)
        scores = torch.rand(tokens, config.num_experts, generator=generator)
        weights, ids = scores.topk(config.top_k)
        ids = ids.int()
        ids[::5, 0] = -1
        found.append((x, weights, ids))
    return found


def whole_output(case: Case, weights: MoEWeights, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What the layer on one rank makes of a batch."""
    layer = FusedMoELayer.from_weights(case.kind.scheme, case.config, weights, backend="torch")
    x, topk_weights, topk_ids = batch
    return layer.kernel.apply(x, topk_weights=topk_weights, topk_ids=topk_ids)


def rank_kernel(
    case: Case, weights: MoEWeights, groups: ParallelGroups, movement: type[FusedMoEPrepareAndFinalizeModular] | None
) -> FusedMoEKernel:
    """This rank's part of the layer."""
    oracle, selection, converted, placement = rank_parts(case, weights, groups.parallel)
    if movement is not None:
        moved = movement(selection.config, groups, placement=placement)
        return oracle.make_kernel(selection, converted, prepare_finalize=moved)
    return oracle.make_kernel(selection, converted, groups=groups, placement=placement)


def rank_parts(
    case: Case, weights: MoEWeights, parallel: FusedMoEParallelConfig
) -> tuple[Oracle, Selection, KernelWeights, ExpertPlacement]:
    """What the kernel of a rank is made of, on the CPU."""
    placement = placement_of(case.placement, case.config.num_experts, case.ep)
    shard = shard_layer(case.config, weights, parallel, experts=placement.ranks[parallel.ep_rank])
    oracle = registry().oracle(case.kind.scheme)
    selection = oracle.select(
        shard.config,
        weight_key=case.kind.weight_key,
        activation_key=case.kind.activation_key,
        moe_backend=case.backend[0],
        device=case.backend[1],
    )
    return oracle, selection, oracle.convert(selection, shard.weights), placement


def difference(found: Tensor, expected: Tensor, case: Case) -> str | None:
    """How an output differs from the whole layer's by more than sums in another order can; None if it does not.

    Each output is a sum of ``top_k`` weighted results, split among ranks at most ``tp * ep`` times, in float32.
    """
    if found.shape != expected.shape:
        return f"shape {list(found.shape)}, expected {list(expected.shape)}"
    if not found.numel():
        return None
    columns = case.config.intermediate_size
    # the rounding of a sum of N products and of the sums over slots and ranks, against the largest output
    bound = 2.0**-23 * (columns + case.config.top_k + case.tp * case.ep) * float(expected.abs().max())
    error = float((found.float() - expected.float()).abs().max())
    return None if error <= bound else f"differs by {error:g}, the bound is {bound:g}"


def run_cases(rank: int, cases: list[Case]) -> list[str]:
    """What is wrong with this rank's outputs, with the case."""
    made: dict[tuple[int, int], ParallelGroups] = {}
    layers: dict[tuple[Kind, FusedMoEConfig], MoEWeights] = {}
    wrong = []
    for case in cases:
        if (case.tp, case.ep) not in made:
            made[case.tp, case.ep] = ParallelGroups.create(tp_size=case.tp, ep_size=case.ep, timeout=30)
        groups = made[case.tp, case.ep].with_tokens(case.dp, case.all2all)
        if (case.kind, case.config) not in layers:
            layers[case.kind, case.config] = case.kind.weights(case.config)
        weights = layers[case.kind, case.config]
        movement = load_prepare_finalize(case.all2all) if case.all2all in REDUCTIONS else None
        kernel = rank_kernel(case, weights, groups, movement)
        x, topk_weights, topk_ids = inputs(case)[groups.parallel.dp_rank]
        expected = whole_output(case, weights, (x, topk_weights, topk_ids))
        if case.all2all == "reduce_scatter":
            each = -(-len(x) // 4)
            expected = expected[rank * each : (rank + 1) * each]
        counts = case.tokens if case.counted else None
        for _ in range(2):  # the second call has tables, and memory that was used
            found = kernel.apply(x, topk_weights=topk_weights, topk_ids=topk_ids, tokens_per_rank=counts)
            problem = difference(found, expected, case)
            if problem is not None:
                wrong.append(f"{case}: rank {rank} {problem}")
                break
    return wrong
