"""Layers over several GPUs whose partial sums are added by NCCL, calls that overlap, and a rank that is gone."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from moe_core import FusedMoEKernel, MoEError, registry, shard_layer
from moe_core.parallel.distributed import ParallelGroups
from moe_core.parallel.prepare_finalize.by_name import REDUCTIONS, load_prepare_finalize
from moe_core.runtime.kernel_call import overlapped
from moe_core_gpu_ranks import differs, exact_output
from moe_core_rank_layers import Case, inputs, placement_of


def kernel_on(case: Case, groups: ParallelGroups | None) -> FusedMoEKernel:
    """The layer, or this rank's part of it, on this rank's GPU, with the backend that is selected there."""
    device = torch.device("cuda", torch.cuda.current_device())
    config, weights, placement = case.config, case.kind.weights(case.config), None
    if groups is not None:
        placement = placement_of(case.placement, config.num_experts, case.ep)
        shard = shard_layer(config, weights, groups.parallel, experts=placement.ranks[groups.parallel.ep_rank])
        config, weights = shard.config, shard.weights
    oracle = registry().oracle(case.kind.scheme)
    keys = {"weight_key": case.kind.weight_key, "activation_key": case.kind.activation_key}
    selection = oracle.select(config, device=device, **keys)  # type: ignore[arg-type]
    converted = oracle.convert(selection, weights.to(device))
    if groups is not None and case.all2all in REDUCTIONS:
        movement = load_prepare_finalize(case.all2all)(config, groups, placement=placement)
        return oracle.make_kernel(selection, converted, prepare_finalize=movement)
    return oracle.make_kernel(selection, converted, groups=groups, placement=placement)


def run_cases(rank: int, cases: list[Case]) -> list[str]:
    """What is wrong with this rank's outputs: of plain calls, of calls that overlap, of graphs where they may be."""
    wrong: list[str] = []
    made: dict[tuple[int, int], ParallelGroups] = {}
    for case in cases:
        if (case.tp, case.ep) not in made:
            made[case.tp, case.ep] = ParallelGroups.create(tp_size=case.tp, ep_size=case.ep, timeout=60)
        groups = made[case.tp, case.ep].with_tokens(case.dp, case.all2all)
        kernel, whole = kernel_on(case, groups), kernel_on(case, None)
        batch = [tensor.cuda() for tensor in inputs(case)[groups.parallel.dp_rank]]
        x, given = batch[0], {"topk_weights": batch[1], "topk_ids": batch[2]}
        expected, rows = whole.apply(x, **given), slice(None)
        if case.all2all == "reduce_scatter":
            each = -(-len(x) // (case.tp * case.ep))
            rows = slice(rank * each, (rank + 1) * each)
            expected = expected[rows]
        exact = partial(exact_output, case.kind, case.config, *(tensor[rows] for tensor in batch))
        movement = kernel.prepare_finalize
        assert movement is not None
        if case.all2all == "alltoall":
            movement.most_shared = 0  # NCCL's; writes into other GPUs' memory: moe_core_gpu_ranks
        found = {f"call {number}": kernel.apply(x, **given) for number in range(4)}
        starts = [lambda kernel=kernel, x=x, given=given: kernel.start(x, **given) for _ in range(3)]
        found |= {f"overlapped call {number}": output for number, output in enumerate(overlapped(starts))}
        if movement.capturable and kernel.experts.claims.cuda_graph and len(set(case.tokens)) == 1:
            torch.cuda.synchronize()
            graph, output = torch.cuda.CUDAGraph(), torch.empty_like(expected)
            with torch.cuda.graph(graph):
                kernel.apply(x, **given, output=output)
            for number in range(2):
                output.fill_(float("nan"))
                graph.replay()
                found[f"replay {number}"] = output.clone()
        groups.among().synchronize()
        for name, one in found.items():
            text = differs(one, expected, exact) if one.shape == expected.shape else f"has shape {list(one.shape)}"
            if one.numel() and text is not None:
                wrong.append(f"{case}: rank {rank}, {name}: {text}")
    return wrong


def replayed(rank: int, case: Case) -> tuple[str | None, ...]:
    """Whether the experts' launches of an all-reduced layer are recorded: None for each kind of call that is."""
    groups = ParallelGroups.create(tp_size=case.tp, ep_size=case.ep, timeout=60)
    kernel = kernel_on(case, groups)
    x, topk_weights, topk_ids = (tensor.cuda() for tensor in inputs(case)[0])
    expert_map = placement_of(case.placement, case.config.num_experts, case.ep).expert_map(rank // case.tp, "cuda")
    movement = load_prepare_finalize("all_reduce")(kernel.config, groups)
    kernel = FusedMoEKernel(kernel.experts, kernel.weights, movement)
    for _ in range(3):
        kernel.apply(x, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map)
    torch.cuda.synchronize()
    return kernel._replay.reasons()


def missing(rank: int, all2all: str, case: Case) -> tuple[str, float]:
    """Rank 1 does not take part in a call: what rank 0 is told, and after how many seconds."""
    groups = ParallelGroups.create(timeout=3, dp_size=case.dp, all2all_backend=all2all)
    kernel = kernel_on(case, groups)
    x, topk_weights, topk_ids = (tensor.cuda() for tensor in inputs(case)[groups.parallel.dp_rank])
    given: dict[str, Any] = {"topk_weights": topk_weights, "topk_ids": topk_ids}
    kernel.apply(x, **given)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(8)
        return "", 0.0
    started = time.monotonic()
    try:
        kernel.apply(x, **given)
        groups.among().synchronize("a call's work is done")
    except MoEError as error:
        return f"{type(error).__name__}: {error.message}", time.monotonic() - started
    return "nothing", time.monotonic() - started
