"""Calls of small layers over four ranks: steps, kinds of experts, changes while serving, ranks that disagree."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from moe_core import FusedMoEConfig, FusedMoEExperts, FusedMoEKernel, FusedMoELayer, MoEError, MoEWeights, route
from moe_core.interface.prepare_finalize import FusedMoEPrepareAndFinalizeModular, TokenRouting
from moe_core.parallel.distributed import ParallelGroups
from moe_core.parallel.distributed.agreement import check_layers
from moe_core.parallel.placement.placement import ExpertPlacement
from moe_core.parallel.prepare_finalize.all_gather import AllGatherPrepareAndFinalize
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize, load_prepare_finalize
from moe_core.parallel.prepare_finalize.reductions import TopKWeightAndReduceNoOP
from moe_core.runtime.kernel_call import overlapped
from moe_core.spec.lora import LoRA, LoRAWeights
from moe_core.testing.data import make_weights
from moe_core_toys import MonolithicToyExperts, ToyExperts, UnreducedToyExperts
from torch import Tensor

BACKENDS = ("allgather_reducescatter", "alltoall")
CONFIG = FusedMoEConfig(
    num_experts=6, top_k=2, hidden_size=16, intermediate_size=8, dtype=torch.float32, routing="Renormalize"
)  # type: ignore[arg-type]
SPREAD = ExpertPlacement(6, ((0, 3), (1, 5), (4, 2), (3, 1)))
MOVED = ExpertPlacement(6, ((5, 1), (2, 0), (3, 4), (0, 2)))


class Unequal(AssertionError):
    """What was found where something else was expected."""


def equal(found: Tensor, expected: Tensor) -> None:
    # sums of two results, in another order; torch.testing would import five hundred modules on each rank
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-6, atol=1e-6 * 16):
        raise Unequal(f"found {found}, expected {expected}")


def weights_of(config: FusedMoEConfig = CONFIG) -> MoEWeights:
    return make_weights(config, None, None, seed=2)


def held(weights: MoEWeights, experts: tuple[int, ...]) -> MoEWeights:
    """Copies of some experts."""
    return replace(weights, **{name: tensor[list(experts)].clone() for name, tensor in weights.tensors()})


def batch(rank: int, config: FusedMoEConfig = CONFIG) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens of a rank's own, of which there are as many as its number: (x, logits, topk_weights, topk_ids)."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(rank, config.hidden_size, generator=generator).to(config.dtype)
    logits = torch.randn(rank, config.num_experts, generator=generator)
    assert config.routing is not None
    return x, logits, *route(logits, top_k=config.top_k, config=config.routing)


def kernel_of(
    experts: type[FusedMoEExperts],
    config: FusedMoEConfig,
    movement: FusedMoEPrepareAndFinalizeModular | None,
    weights: MoEWeights,
) -> FusedMoEKernel:
    made = experts(config, weight_key=None, activation_key=None, device=None)
    return FusedMoEKernel(made, made.convert(weights), movement)


def whole(experts: type[FusedMoEExperts], **changes: Any) -> FusedMoEKernel:
    """The layer on one rank."""
    config = replace(CONFIG, **changes)
    return kernel_of(experts, config, default_prepare_finalize(config), weights_of(config))


def part(
    experts: type[FusedMoEExperts], groups: ParallelGroups, placement: ExpertPlacement = SPREAD, **changes: Any
) -> FusedMoEKernel:
    """This rank's part."""
    config = replace(CONFIG, parallel=groups.parallel, num_local_experts=2, **changes)
    movement = default_prepare_finalize(config, groups, placement=placement)
    return kernel_of(experts, config, movement, held(weights_of(), placement.ranks[groups.parallel.ep_rank]))


def call_of(rank: int) -> tuple[Tensor, dict[str, Any], Tensor]:
    """(x, the other arguments, what the layer on one rank gives) of a rank's own tokens."""
    x, _, topk_weights, topk_ids = batch(rank)
    given = {"topk_weights": topk_weights, "topk_ids": topk_ids}
    return x, given, whole(ToyExperts).apply(x, **given)


def kinds_of_experts(rank: int) -> None:
    """Experts that sum, and those that leave it to finalize."""
    groups = ParallelGroups.create(timeout=20, dp_size=4)
    x, given, expected = call_of(rank)
    for all2all in BACKENDS:
        own = groups.with_tokens(4, all2all)
        movement = part(ToyExperts, own).prepare_finalize
        assert movement is not None
        routing = TokenRouting(**given)
        prepared = movement.prepare(x, routing)
        output = torch.empty_like(x)
        sums = torch.zeros_like(prepared.hidden_states)
        movement.finalize(output, sums, prepared, routing, TopKWeightAndReduceNoOP())
        # rows that fill up what a rank brings have no expert, which would compute for nothing
        if int((prepared.routing.topk_ids >= 0).any(1).sum()) > 0 + 1 + 2 + 3:
            raise Unequal(f"{all2all}: more tokens than there are")
        for experts in (ToyExperts, UnreducedToyExperts):
            kernel = part(experts, own)
            first = kernel.apply(x, **given)
            equal(first, expected)
            # the same bits in every call, given how many tokens there are, and in memory of the caller's
            output = torch.full_like(x, float("nan"))
            again = kernel.apply(x, **given, output=output, tokens_per_rank=[0, 1, 2, 3])
            if again is not output or not torch.equal(again, first):
                raise Unequal(all2all)


def noted(events: list[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, which tells ``events`` of each of its calls."""

    def run(*arguments: Any, **named: Any) -> Any:
        events.append(name)
        return call(*arguments, **named)

    return run


def steps(rank: int) -> list[list[str]]:
    """Calls in steps, one and then three at the same time: what this rank did in what order, for each backend."""
    groups = ParallelGroups.create(timeout=20, dp_size=4)
    found: list[list[str]] = []
    for all2all in BACKENDS:
        events: list[str] = []
        kernel = part(ToyExperts, groups.with_tokens(4, all2all))
        movement, plain = kernel.prepare_finalize, whole(ToyExperts)
        assert movement is not None

        for name in ("dispatch", "combine"):
            setattr(movement, name, noted(events, name, getattr(movement, name)))
        kernel.experts.apply = noted(events, "experts", kernel.experts.apply)  # type: ignore[attr-defined]
        batches = [batch(rank), batch(3 - rank), batch(1)]
        given = [{"topk_weights": w, "topk_ids": i} for _, _, w, i in batches]
        expected = [plain.apply(one[0], **named) for one, named in zip(batches, given, strict=True)]
        call = kernel.start(batches[0][0], **given[0])
        events.append("shared experts")
        call.run_experts()
        call.run_experts()
        events.append("next layer's weights")
        equal(call.result(), expected[0])
        if call.result() is not call.result():
            raise Unequal("a result is there once")
        starts = [partial(kernel.start, one[0], **named) for one, named in zip(batches, given, strict=True)]
        for output, wanted in zip(overlapped(starts), expected, strict=True):
            equal(output, wanted)
        found.append(events)
    return found


def same_tokens(rank: int) -> None:
    """All ranks with the same tokens: experts that route, and a sum that is shared out."""
    groups = ParallelGroups.create(timeout=20)
    contiguous = ExpertPlacement(6, ((0, 1), (2, 3), (4,), (5,)))
    config = replace(CONFIG, parallel=groups.parallel, num_local_experts=len(contiguous.ranks[rank]))
    weights = held(weights_of(), contiguous.ranks[rank])
    x, logits, topk_weights, topk_ids = batch(3)
    expected = whole(ToyExperts).apply(x, topk_weights=topk_weights, topk_ids=topk_ids)
    expert_map = contiguous.expert_map(rank)
    movement = default_prepare_finalize(config, groups)
    kernel = kernel_of(ToyExperts, config, movement, weights)
    equal(kernel.apply(x, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map), expected)
    routing = kernel_of(MonolithicToyExperts, config, default_prepare_finalize(config, groups), weights)
    equal(routing.apply_monolithic(x, router_logits=logits, expert_map=expert_map), expected)
    config = replace(config, parallel=replace(groups.parallel, all2all_backend="reduce_scatter"))
    shared = default_prepare_finalize(config, groups)
    for made in (
        kernel_of(ToyExperts, config, shared, weights),
        kernel_of(MonolithicToyExperts, config, shared, weights),
    ):
        given: dict[str, Any] = {"topk_weights": topk_weights, "topk_ids": topk_ids}
        call = made.apply_monolithic if made.is_monolithic else made.apply
        found = call(x, expert_map=expert_map, **({"router_logits": logits} if made.is_monolithic else given))
        equal(found, expected[rank : rank + 1])
        if not made.is_monolithic:  # rows of a rank have no place in [..., K]
            layer = FusedMoELayer(made, cast(Any, None), expert_map=expert_map)
            one = {name: tensor[:1] for name, tensor in given.items()}
            equal(layer(x[None, :1], **one), expected[:1] if rank == 0 else expected[:0])


def moving(rank: int) -> None:
    """Experts change places between two calls, and tokens follow."""
    groups = ParallelGroups.create(timeout=20, dp_size=4)
    x, given, expected = call_of(rank)
    for all2all in BACKENDS:
        kernel = part(ToyExperts, groups.with_tokens(4, all2all))
        movement = kernel.prepare_finalize
        assert movement is not None
        for placement in (MOVED, SPREAD):
            equal(kernel.apply(x, **given), expected)
            movement.move_experts(placement)
            kernel.weights.copy_(kernel.experts.convert(held(weights_of(), placement.ranks[rank])))
        equal(kernel.apply(x, **given), expected)


def copies(rank: int) -> None:
    """A copy communicates with the same ranks; where it sends tokens is its own matter."""
    groups = ParallelGroups.create(timeout=20, dp_size=4)
    x, given, expected = call_of(rank)
    for all2all in BACKENDS:
        kernel = part(ToyExperts, groups.with_tokens(4, all2all))
        kernel.apply(x, **given)
        copied = copy.deepcopy(kernel)
        movement = copied.prepare_finalize
        assert movement is not None
        movement.move_experts(MOVED)
        copied.weights.copy_(copied.experts.convert(held(weights_of(), MOVED.ranks[rank])))
        equal(copied.apply(x, **given), expected)
        equal(kernel.apply(x, **given), expected)


class InvariantToyExperts(ToyExperts):
    """Token by token, so nothing depends on the others."""

    claims = replace(ToyExperts.claims, batch_invariant=True)


class Unclaimed(AllGatherPrepareAndFinalize):
    claims = replace(AllGatherPrepareAndFinalize.claims, batch_invariant=False)


def invariant(rank: int) -> list[str]:
    """A batch-invariant layer: a token alone, among others, and with any all2all backend has the same bits.

    With four experts per token three and four ranks are added up.  What is refused.
    """
    groups = ParallelGroups.create(timeout=20, dp_size=4)
    placement = ExpertPlacement.contiguous(6, 4)
    changes: dict[str, Any] = {"top_k": 4, "batch_invariant": True, "num_local_experts": len(placement.ranks[rank])}
    config = replace(CONFIG, parallel=groups.parallel, **changes)
    x, _, topk_weights, topk_ids = batch(7, config)
    weights = held(weights_of(), placement.ranks[rank])

    def kernel_with(own: ParallelGroups, cls: type[FusedMoEPrepareAndFinalizeModular] | None = None) -> FusedMoEKernel:
        asked = replace(config, parallel=own.parallel)
        make = default_prepare_finalize if cls is None else cls
        movement = make(asked, own, placement=placement)
        return kernel_of(InvariantToyExperts, asked, movement, weights)

    def call(kernel: FusedMoEKernel, tokens: slice) -> Tensor:
        return kernel.apply(x[tokens], topk_weights=topk_weights[tokens], topk_ids=topk_ids[tokens])

    found = {}
    for name, own in {
        "all_reduce": groups.with_tokens(1),
        **{all2all: groups.with_tokens(4, all2all) for all2all in BACKENDS},
    }.items():
        kernel = kernel_with(own)
        found[name] = together = call(kernel, slice(0, 7))
        alone = [call(kernel, slice(token, token + 1)) for token in range(7)]
        if not torch.equal(torch.cat(alone), together):
            raise Unequal(f"{name}: tokens alone and together")
    same = found["all_reduce"]
    if not all(torch.equal(output, same) for output in found.values()):
        raise Unequal("backends differ")
    shared = kernel_with(groups.with_tokens(1), load_prepare_finalize("reduce_scatter"))
    if not torch.equal(call(shared, slice(0, 7)), same[2 * rank : 2 * rank + 2]):
        raise Unequal("reduce_scatter")
    replicated = replace(config, num_local_experts=2)
    return [
        told(lambda: default_prepare_finalize(replicated, groups, placement=SPREAD)),
        told(lambda: kernel_with(groups, Unclaimed)),
    ]


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except MoEError as error:
        return f"{type(error).__name__}: {error.message}"
    return "nothing"


def disagreeing(rank: int) -> list[str]:
    """What ranks are told whose layers differ."""
    groups = ParallelGroups.create(timeout=10, dp_size=4)

    def compare(placement: ExpertPlacement | None = SPREAD, **changes: Any) -> str:
        config = replace(CONFIG, parallel=groups.parallel, num_local_experts=2, **changes)
        experts = ToyExperts(config, weight_key=None, activation_key=None, device=None)
        return told(lambda: check_layers(groups.among(), experts, placement))

    odd = rank == 2
    return [
        compare(),
        compare(top_k=1 if odd else 2),
        compare(num_experts=7 if odd else 6),
        compare(hidden_size=32 if odd else 16),
        compare(intermediate_size=24 if odd else 8),
        compare(dtype=torch.bfloat16 if odd else torch.float32),
        compare(MOVED if odd else SPREAD),
    ]


class ScaledByAdapter(ToyExperts):
    """An adapter multiplies what the experts make of a token by its number and 2."""

    claims = replace(ToyExperts.claims, lora=True)

    def apply(self, output: Tensor, *given: Any, lora: LoRA | None = None, **named: Any) -> None:
        super().apply(output, *given, **named)
        if lora is not None:
            output *= (2 + lora.adapter_ids)[:, None]


def adapters(rank: int) -> None:
    """Ranks of which some give adapters, and one has none for its tokens; then none gives any."""
    groups = ParallelGroups.create(timeout=10, dp_size=4)
    x, given, expected = call_of(rank)
    for all2all in BACKENDS:
        kernel = part(
            ScaledByAdapter, groups.with_tokens(4, all2all), is_lora_enabled=True, max_loras=3, max_lora_rank=1
        )
        kernel.lora = LoRAWeights.zeros(kernel.config, "cpu")
        ids = torch.arange(len(x), dtype=torch.int32) - 1
        equal(
            kernel.apply(x, **given, adapter_ids=None if rank == 2 else ids),
            expected * (1 if rank == 2 else 2 + ids[:, None]),
        )
        equal(kernel.apply(x, **given), expected)


def missing(rank: int) -> tuple[list[str], float]:
    """Rank 1 doesn't take part in a call: what the others are told with each all2all backend, and after how long."""
    found, longest = [], 0.0
    for all2all in BACKENDS:
        groups = ParallelGroups.create(timeout=1, dp_size=4, all2all_backend=all2all)
        kernel = part(ToyExperts, groups)
        x, _, topk_weights, topk_ids = batch(rank)
        started = time.monotonic()
        if rank != 1:
            found.append(told(partial(kernel.apply, x, topk_weights=topk_weights, topk_ids=topk_ids)))
            longest = max(longest, time.monotonic() - started)
        time.sleep(max(0.0, 2.5 - (time.monotonic() - started)))
    return found, longest


def unfit(rank: int) -> list[str]:
    """What is refused on each rank alone."""
    groups = ParallelGroups.create(timeout=10, dp_size=4)
    config = replace(CONFIG, parallel=groups.parallel, num_local_experts=2)
    x, _, topk_weights, topk_ids = batch(rank)
    kernel = part(ToyExperts, groups)
    named: dict[str, Any] = {"topk_weights": topk_weights, "topk_ids": topk_ids}
    unknown = replace(groups.parallel, all2all_backend="x")
    return [
        told(lambda: default_prepare_finalize(config, groups.with_tokens(1))),
        told(lambda: default_prepare_finalize(config, groups, placement=ExpertPlacement.contiguous(6, 3))),
        told(lambda: default_prepare_finalize(replace(config, num_local_experts=3), groups, placement=SPREAD)),
        told(lambda: default_prepare_finalize(replace(config, parallel=unknown), groups)),
        told(lambda: kernel.apply(x, **named, tokens_per_rank=[1, 1])),
        told(lambda: kernel.apply(x, **named, tokens_per_rank=[9, 9, 9, 9])),
        told(lambda: load_prepare_finalize("all_reduce")(config, groups)),
        told(lambda: load_prepare_finalize("alltoall")(config)),
        told(lambda: FusedMoELayer(kernel, cast(Any, None), expert_map=MOVED.expert_map(rank))),
        told(lambda: FusedMoELayer(kernel, cast(Any, None), expert_map=SPREAD.expert_map(rank))),
        told(lambda: kernel.prepare_finalize.move_experts(ExpertPlacement.round_robin(6, 4))),  # type: ignore[union-attr]
    ]


def every(rank: int) -> dict[str, Any]:
    """All of these in one start of the ranks; :func:`missing` last, since it leaves groups that are broken."""
    programs = (kinds_of_experts, steps, same_tokens, moving, copies, invariant, adapters, disagreeing, unfit, missing)
    return {program.__name__: program(rank) for program in programs}
