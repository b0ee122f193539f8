"""``moe bench`` on the ranks of torchrun: time of a layer with each prepare/finalize class."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moe_core.cli._layers import INPUTS, Layer, random_call
from moe_core.cli._output import progress
from moe_core.parallel.distributed.cost import products_of
from moe_core.parallel.distributed.uniform_routing import active_experts
from moe_core.spec.config import TokenSharing

if TYPE_CHECKING:
    from moe_core.cli._machine import Limits
    from moe_core.cli._prepare_finalize import PrepareFinalizeCandidate
    from moe_core.cli._ranks import Ranks
    from moe_core.parallel.distributed import ParallelGroups
    from moe_core.parallel.shard import LayerShard
    from moe_core.spec.weights import MoEWeights


@dataclass(frozen=True, eq=False)
class RankLayer:
    """A rank's shard of a layer, and the prepare/finalize classes to measure.

    Attributes:
        layer: The whole layer.
        shard: This rank's shard.
        names: Names of the prepare/finalize classes.
        groups: Process groups of the ranks.
        ranks: The ranks.
    """

    layer: Layer
    shard: LayerShard
    names: tuple[str, ...]
    groups: ParallelGroups
    ranks: Ranks

    @staticmethod
    def of(args: argparse.Namespace, layer: Layer, weights: MoEWeights, ranks: Ranks, most: int) -> RankLayer:
        """Shard the weights of the whole layer, for calls with at most ``most`` tokens per rank.

        The classes are all that fit, or the requested one ("auto": the fastest according to the machine's figures).
        """
        from moe_core.cli import _arguments
        from moe_core.parallel.shard import shard_layer

        keys = weights.weight_key, weights.activation_key
        config, cuts = _arguments.cuts_of(layer.config, keys, ranks.parallel)
        found, chosen, cut = ranks.choose(args, layer.scheme, config, cuts, most)
        names = (chosen.name,) if args.all2all is not None else tuple(c.name for c in found.candidates if c.fits)
        shard = shard_layer(layer.config, weights, ranks.parallel, cut=cut)
        return RankLayer(layer, shard, names, ranks.groups(chosen), ranks)

    def candidate(self, args: argparse.Namespace, name: str, tokens: int) -> PrepareFinalizeCandidate:
        """Return the candidate of that name, with its cost for ``tokens`` per rank."""
        from moe_core.cli import _arguments

        keys = self.layer.weight_key, self.layer.activation_key
        config, cuts = _arguments.cuts_of(self.layer.config, keys, self.ranks.parallel)
        asked = argparse.Namespace(**{**vars(args), "all2all": name})
        return self.ranks.choose(asked, self.layer.scheme, config, cuts, tokens)[1]


def measure_ranks(
    args: argparse.Namespace, part: RankLayer, counts: Sequence[int], limits: Limits
) -> Iterator[dict[str, Any]]:
    """Yield the measurement of each prepare/finalize class and number of tokens per rank.

    All ranks call this and get the same results.
    """
    from moe_core.cli._timing import measure
    from moe_core.selection.registry import registry

    oracle, ranks, device = registry().oracle(part.layer.scheme), part.ranks, part.ranks.device
    parallel = ranks.parallel
    for name in part.names:
        candidate = part.candidate(args, name, max(counts))
        selection = candidate.selection
        if selection is None:
            continue
        groups = part.groups.with_tokens(parallel.dp_size, name)
        with progress(f"{name}, {selection.backend}: converting the weights"):
            movement = candidate.cls(selection.config, groups)
            weights = oracle.convert(selection, part.shard.weights)
            kernel = oracle.make_kernel(selection, weights, prepare_finalize=movement)
        # Classes that move tokens know the placement of the experts.
        known = parallel.token_sharing is not TokenSharing.ALL
        expert_map = None if known else part.shard.expert_map
        whole = replace(selection.config, parallel=type(parallel)(), num_local_experts=None)
        for count in counts:
            told = [count] * parallel.dp_size if known else None
            seeds = [1000 * parallel.dp_rank + seed for seed in range(INPUTS)]
            inputs = [random_call(whole, count, device, seed, skew=args.skew) for seed in seeds]
            calls = [
                functools.partial(
                    kernel.apply, x, topk_weights=weight, topk_ids=ids, expert_map=expert_map, tokens_per_rank=told
                )
                for x, weight, ids in inputs
            ]
            with progress(f"{name}, {selection.backend}: {count} tokens per rank"):
                calls[0]()  # The first call lets prepare/finalize find out whether it is capturable.
                graph = movement.capturable and selection.experts.claims.cuda_graph
                timing = measure(calls, device, graph=graph, budget=args.budget, slowest=ranks.slowest)
            median, low, high = map(ranks.slowest, (timing.median, timing.low, timing.high))
            config, every = selection.config, count * parallel.dp_size
            active = active_experts(config.num_experts, config.local_experts, config.top_k, every)
            states = 2 * count * config.hidden_size * config.dtype.itemsize
            moved = weights.nbytes / config.local_experts * active + states
            floor = limits.floor(moved, products_of(config, every))
            cost = part.candidate(args, name, count).cost
            yield {
                "backend": f"{name} {selection.backend}",
                "prepare_finalize": name,
                "tokens": count,
                "active_experts": active,
                "seconds": median,
                "seconds_p10_p90": [low, high],
                "calls": timing.calls,
                "cuda_graph": timing.graph,
                "floor_seconds": floor,
                "time_over_floor": median / floor,
                "predicted_seconds": None if cost is None else cost.seconds,
                "predicted": None if cost is None else cost.as_dict(),
            }
