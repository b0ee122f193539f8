"""What ranks with a GPU each do in tests: layers over them against the layer on one GPU."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from moe_core import FusedMoEConfig, FusedMoEKernel, FusedMoELayer, registry, shard_layer
from moe_core.errors import CommunicationError, FallbackWarning
from moe_core.parallel.distributed import ParallelGroups
from moe_core.reference.tolerance import Expected, expected_output
from moe_core.spec.workspace import Workspace
from moe_core_layers import Kind
from moe_core_rank_layers import placement_of
from torch import Tensor

ROOM = 32
#: the rank that leaves
GONE = 1
SIZES: dict[str, Any] = {"num_experts": 16, "top_k": 4, "hidden_size": 1024, "intermediate_size": 512}


def _kernel(kind: Kind, config: FusedMoEConfig, groups: ParallelGroups, placed: str) -> FusedMoEKernel:
    """This rank's part on its GPU, by whatever backend is chosen there."""
    placement = placement_of(placed, config.num_experts, groups.parallel.ep_size)
    parallel = groups.parallel
    shard = shard_layer(config, kind.weights(config), parallel, experts=placement.ranks[parallel.ep_rank])
    oracle = registry().oracle(kind.scheme)
    selection = oracle.select(
        shard.config, weight_key=kind.weight_key, activation_key=kind.activation_key, device="cuda"
    )
    weights = oracle.convert(selection, shard.weights.to("cuda"))
    workspace = Workspace("cuda")  # as an engine's: descriptors hold its address
    return oracle.make_kernel(selection, weights, groups=groups, placement=placement, workspace=workspace)


def replay_reasons(kernel: FusedMoEKernel) -> tuple[str | None, ...]:
    """Of the experts' launches and of those around them, by kind of call: None where they are replayed."""
    steps = kernel.prepare_finalize.destinations._steps.values()
    return (*kernel._replay.reasons(), *(reason for step in steps for reason in step.reasons()))


def _fill(x: Tensor, weights: Tensor, ids: Tensor, tokens: int, generator: torch.Generator) -> None:
    """New inputs of ``tokens`` tokens in the memory of a graph; the rows after them select no expert."""
    x.copy_(torch.randn(x.shape, generator=generator))
    scores = torch.rand(len(ids), SIZES["num_experts"], generator=generator)
    best = scores.topk(ids.shape[1])
    weights.copy_(best.values)
    ids.copy_(best.indices)
    ids[tokens:] = -1


def differs(found: Tensor, whole: Tensor, exact: Callable[[], Expected]) -> str | None:
    """By more from what the layer gives on one GPU, and from ``exact``, than roundings can.

    Two sound results may differ by more than the first bound: other kernels add up in another order, and values of h
    next to a rounding boundary become other codes.
    """
    error, size = (found.float() - whole.float()).norm(), whole.float().norm()
    if error <= 2.0**-6 * size:
        return None
    reference = exact()
    off, norm = float((found.cpu().double() - reference.exact).norm()), float(reference.exact.norm())
    # the reference rounds the result; ranks' parts, which together are no larger in the mean, are rounded too
    if off <= reference.limit + 2.0**-7 * norm:
        return None
    text = f"differs by {float(error / size):g} of the norm, and is off by {off / norm:g} of it"
    lost = (~found.isfinite()).nonzero().tolist()
    # rows and columns tell what was lost: a tile, a token, a part of a sum
    return text if not lost else f"{text}; {len(lost)} elements are not finite, among them {lost[:8]} to {lost[-1]}"


def exact_output(kind: Kind, config: FusedMoEConfig, x: Tensor, weights: Tensor, ids: Tensor) -> Expected:
    """The reference of the whole layer."""
    given = {"topk_weights": weights.cpu(), "topk_ids": ids.cpu()}
    return expected_output(x.cpu(), kind.weights(config), config, **given)


def layers(rank: int, kinds: list[Kind], backends: list[str], placed: str) -> list[str]:
    """What is wrong with outputs: of eager calls, and of 100 replays of a CUDA graph with other inputs and counts.

    A rank with a wrong output goes on: the others wait for it in every call.
    """
    wrong = []
    everyone = ParallelGroups.create(timeout=60)
    for kind in kinds:
        config = kind.config(**SIZES, dtype=torch.bfloat16, max_num_tokens=ROOM)
        whole = FusedMoELayer.from_weights(kind.scheme, config, kind.weights(config).to("cuda")).kernel
        for all2all in backends:
            groups = everyone.with_tokens(everyone.parallel.world_size, all2all)
            with warnings.catch_warnings():
                warnings.simplefilter("error", FallbackWarning)  # the backend itself is tested
                kernel = _kernel(kind, config, groups, placed)
            generator = torch.Generator().manual_seed(rank)
            x = torch.empty(ROOM, config.hidden_size, dtype=torch.bfloat16, device="cuda")
            weights = torch.empty(ROOM, config.top_k, device="cuda")
            ids = torch.empty(ROOM, config.top_k, dtype=torch.int32, device="cuda")

            def call(
                kernel: FusedMoEKernel, tokens: int = ROOM, counts: Any = None, x=x, weights=weights, ids=ids
            ) -> Tensor:
                return kernel.apply(
                    x[:tokens], topk_weights=weights[:tokens], topk_ids=ids[:tokens], tokens_per_rank=counts
                )

            # ranks with other numbers of tokens, none too; the third call of a kind is replayed
            for turn in range(12):
                tokens = (ROOM, 0, 1, 7)[(turn + rank) % 4]
                _fill(x, weights, ids, tokens, generator)
                rows = x[:tokens], weights[:tokens], ids[:tokens]
                problem = differs(call(kernel, tokens), call(whole, tokens), partial(exact_output, kind, config, *rows))
                wrong += [] if problem is None else [f"{kind} {all2all}, {tokens} tokens: rank {rank} {problem}"]
            found = replay_reasons(kernel)
            if not found or set(found) != {None}:
                wrong.append(f"{kind} {all2all}: rank {rank} does not replay its calls: {found}")
            if not kernel.prepare_finalize.capturable:
                continue
            counts = [ROOM] * groups.parallel.dp_size  # for backends whose host must know
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                call(kernel, counts=counts)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    outputs = [
                        call(kernel, counts=counts) for _ in range(3)
                    ]  # an odd number: the buffers of a replay start anew
                for replay in range(100):
                    tokens = int(torch.randint(ROOM + 1, (), generator=generator))
                    _fill(x, weights, ids, tokens, generator)
                    graph.replay()
                    expected = call(whole)
                    found = [output.clone() for output in outputs]
                    if not all(torch.equal(found[0], other) for other in found):
                        wrong.append(f"{kind} {all2all}: rank {rank}, replay {replay} gives other bits in its calls")
                    problem = differs(found[0], expected, partial(exact_output, kind, config, x, weights, ids))
                    wrong += [] if problem is None else [f"{kind} {all2all}: rank {rank}, replay {replay} {problem}"]
            torch.cuda.synchronize()
            if all2all != "allgather_reducescatter":
                kernel.prepare_finalize.check()
            del graph
    return wrong


def invariant(rank: int, kind: Kind, backends: list[str]) -> list[str]:
    """The all2all backends with which a batch-invariant layer gives a token other bits alone than among others."""
    wrong = []
    everyone = ParallelGroups.create(timeout=60)
    config = kind.config(**SIZES, dtype=torch.bfloat16, max_num_tokens=ROOM, batch_invariant=True)
    x = torch.empty(ROOM, config.hidden_size, dtype=torch.bfloat16, device="cuda")
    weights = torch.empty(ROOM, config.top_k, device="cuda")
    ids = torch.empty(ROOM, config.top_k, dtype=torch.int32, device="cuda")
    _fill(x, weights, ids, ROOM, torch.Generator().manual_seed(0))
    for all2all in backends:
        shared = all2all == "all_reduce"
        groups = everyone.with_tokens(1) if shared else everyone.with_tokens(everyone.parallel.world_size, all2all)
        kernel = _kernel(kind, config, groups, "contiguous")
        together = kernel.apply(x, topk_weights=weights, topk_ids=ids)
        for token in (0, 5, ROOM - 1):
            one = slice(token, token + 1)
            alone = kernel.apply(x[one], topk_weights=weights[one], topk_ids=ids[one])
            if not torch.equal(alone, together[one]):
                wrong.append(f"{kind} {all2all}: rank {rank}, token {token}")
    return wrong


def silent(rank: int, all2all: str, kind: Kind) -> tuple[bool, str, float]:
    """A rank leaves after two calls: whether the output is NaN, what is raised, seconds of the wait.

    Where the hosts compare calls the third one raises; elsewhere its output is NaN, and the next one raises.
    """
    ranks = dist.get_world_size()
    groups = ParallelGroups.create(dp_size=ranks, all2all_backend=all2all, timeout=2)
    config = kind.config(**SIZES, dtype=torch.bfloat16, max_num_tokens=ROOM)
    kernel = _kernel(kind, config, groups, "contiguous")
    x = torch.randn(4, config.hidden_size, dtype=torch.bfloat16, device="cuda")
    weights, ids = torch.rand(4, config.num_experts, device="cuda").topk(config.top_k)

    def call() -> Tensor:
        return kernel.apply(x, topk_weights=weights, topk_ids=ids.int(), tokens_per_rank=[4] * ranks)

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    if rank == GONE:
        time.sleep(8)
        return False, "", 0.0
    started = time.monotonic()
    try:
        output = call()
    except CommunicationError as error:
        return True, error.message, time.monotonic() - started
    torch.cuda.synchronize()
    waited = time.monotonic() - started
    try:
        call()
    except CommunicationError as error:
        return bool(output.isnan().all()), error.message, waited
    return bool(output.isnan().all()), "nothing", waited
