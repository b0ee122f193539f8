"""``moe bench`` on the ranks of torchrun: time of a layer with each prepare/finalize class."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moe_core.cli import _arguments
from moe_core.cli._layers import INPUTS, Layer, random_call
from moe_core.cli._output import progress
from moe_core.cli._timing import measure
from moe_core.parallel.distributed.uniform_routing import active_experts
from moe_core.spec.config import TokenSharing

if TYPE_CHECKING:
    from torch import Tensor

    from moe_core.cli._machine import Limits
    from moe_core.cli._prepare_finalize import PrepareFinalizeCandidate
    from moe_core.cli._ranks import Ranks
    from moe_core.cli._timing import Timing
    from moe_core.runtime.kernel import FusedMoEKernel


def measure_ranks(
    args: argparse.Namespace, layer: Layer, ranks: Ranks, counts: Sequence[int], limits: Limits
) -> Iterator[dict[str, Any]]:
    """Yield the measurement of each prepare/finalize class and number of tokens per rank.

    The classes are all that fit, or the requested one ("auto": the fastest according to the machine's figures). All
    ranks call this and get the same results.
    """
    from moe_core.parallel.shard import shard_layer
    from moe_core.selection.registry import registry

    oracle, device, parallel = registry().oracle(layer.scheme), ranks.device, ranks.parallel
    rank_config, plans = _arguments.plans_of(layer.config, (layer.weight_key, layer.activation_key), parallel)

    def candidate(name: str, tokens: int) -> PrepareFinalizeCandidate:
        """Return the candidate of that name, with its cost for ``tokens`` per rank."""
        asked = argparse.Namespace(**{**vars(args), "all2all": name})
        return ranks.choose(asked, layer.scheme, rank_config, plans, tokens)[1]

    with progress("loading the weights"):
        weights = layer.weights()
    found, chosen, plan = ranks.choose(args, layer.scheme, rank_config, plans, max(counts))
    names = (chosen.name,) if args.all2all is not None else tuple(c.name for c in found.candidates if c.fits)
    shard = shard_layer(layer.config, weights, parallel, plan=plan)
    all_groups = ranks.groups(chosen)
    del weights
    for name in names:
        fitting = candidate(name, max(counts))
        selection = fitting.selection
        if selection is None:
            continue
        groups = all_groups.with_tokens(parallel.dp_size, name)
        with progress(f"{name}, {selection.backend}: converting the weights"):
            movement = fitting.cls(selection.config, groups)
            converted = oracle.convert(selection, shard.weights)
            kernel = oracle.make_kernel(selection, converted, prepare_finalize=movement)
        # Classes that move tokens know the placement of the experts.
        known = parallel.token_sharing is not TokenSharing.ALL
        expert_map = None if known else shard.expert_map
        whole = replace(selection.config, parallel=type(parallel)(), num_local_experts=None)
        for count in counts:
            seeds = [1000 * parallel.dp_rank + seed for seed in range(INPUTS)]
            inputs = [random_call(whole, count, device, seed, skew=args.skew) for seed in seeds]
            options: dict[str, Any] = {"expert_map": expert_map}
            if known:
                options["tokens_per_rank"] = [count] * parallel.dp_size
            with progress(f"{name}, {selection.backend}: {count} tokens per rank"):
                calls = calls_of(kernel, inputs, **options)
                calls[0]()  # The first call lets prepare/finalize find out whether it is capturable.
                graph = movement.capturable and selection.experts.claims.cuda_graph
                timing = measure(calls, device, graph=graph, budget=args.budget, slowest=ranks.slowest)
            config, every = selection.config, count * parallel.dp_size
            active = active_experts(config.num_experts, config.local_experts, config.top_k, every)
            floor = limits.floor(config, converted.nbytes, active, count, every)[0]
            cost = candidate(name, count).cost
            yield {
                **timed_result(f"{name} {selection.backend}", count, active, timing, floor),
                "prepare_finalize": name,
                "predicted_seconds": None if cost is None else cost.seconds,
                "predicted": None if cost is None else cost.as_dict(),
            }


def calls_of(
    kernel: FusedMoEKernel, inputs: Sequence[tuple[Tensor, Tensor, Tensor]], **options: Any
) -> list[Callable[[], object]]:
    """Return a call of the kernel for each of ``inputs``: hidden states, router weights and expert ids."""
    return [
        functools.partial(kernel.apply, x, topk_weights=weights, topk_ids=ids, **options) for x, weights, ids in inputs
    ]


def timed_result(backend: str, tokens: int, active: float, timing: Timing, floor: float) -> dict[str, Any]:
    """Return the JSON-ready result of one backend and number of tokens."""
    return {
        "backend": backend,
        "tokens": tokens,
        "active_experts": active,
        "seconds": timing.median,
        "seconds_p10_p90": [timing.low, timing.high],
        "calls": timing.calls,
        "cuda_graph": timing.graph,
        "floor_seconds": floor,
        "time_over_floor": timing.median / floor,
    }
