"""What ranks of the tests of moving experts do."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from moe_core import FusedMoEKernel, FusedMoELayer, MoEError, MoEWeights, load_layer, shard_layer
from moe_core.parallel.distributed import ParallelGroups
from moe_core.parallel.placement.placement import ExpertPlacement
from moe_core.runtime.expert_mover import ExpertMover
from moe_core_layers import Kind, some_kinds
from moe_core_rank_layers import Case, difference, inputs, rank_kernel, whole_output

Ranks = tuple[tuple[int, ...], ...]

#: 8 slots on 4 ranks: without replicas, and 6 experts of which two are on two ranks
WHOLE: tuple[Ranks, ...] = (
    ((0, 1), (2, 3), (4, 5), (6, 7)),
    ((7, 4), (1, 0), (2, 6), (3, 5)),
    ((5, 0), (4, 3), (7, 1), (6, 2)),
)
REPLICATED: tuple[Ranks, ...] = (
    ((0, 1), (2, 3), (4, 5), (0, 1)),
    ((5, 2), (2, 3), (4, 1), (5, 0)),
    ((3, 2), (0, 5), (1, 4), (1, 3)),
)


def refusal(call: Any) -> str:
    """The message of what ``call`` raises, which must be one of the project's errors."""
    try:
        call()
    except MoEError as error:
        return f"{type(error).__name__}: {error.message}"
    return "nothing"


def unlike(kernel: FusedMoEKernel, other: FusedMoEKernel) -> list[str]:
    """Names of weights whose bits differ."""
    theirs = dict(other.weights.tensors())
    return [
        name
        for name, tensor in kernel.weights.tensors()
        if not torch.equal(
            tensor.contiguous().reshape(-1).view(torch.uint8), theirs[name].contiguous().reshape(-1).view(torch.uint8)
        )
    ]


class Moving:
    """A layer of ``kind`` over four ranks, whose placement changes."""

    def __init__(self, kind: Kind, placements: tuple[Ranks, ...], groups: ParallelGroups) -> None:
        experts = 1 + max(expert for rank in placements[0] for expert in rank)
        self.placements = [ExpertPlacement(experts, ranks) for ranks in placements]
        self.case = Case(kind, "allgather_reducescatter", (3, 0, 4, 1), changes=(("num_experts", experts),))
        self.groups = groups.with_tokens(self.case.dp, self.case.all2all)
        self.weights: MoEWeights = kind.weights(self.case.config)
        self.batch = inputs(self.case)[self.groups.parallel.dp_rank]
        self.expected = whole_output(self.case, self.weights, self.batch)
        self.kernel = self.make(self.placements[0])
        self._made: dict[ExpertPlacement, FusedMoEKernel] = {}

    def fresh(self, placement: ExpertPlacement) -> FusedMoEKernel:
        """A kernel that was made for the placement."""
        if placement not in self._made:
            self._made[placement] = self.make(placement)
        return self._made[placement]

    def make(self, placement: ExpertPlacement) -> FusedMoEKernel:
        """A kernel for the placement, whose weights may be overwritten."""
        with mock.patch("moe_core_rank_layers.placement_of", return_value=placement):
            return rank_kernel(self.case, self.weights, self.groups, None)

    def wrong(self) -> str | None:
        x, topk_weights, topk_ids = self.batch
        found = self.kernel.apply(x, topk_weights=topk_weights, topk_ids=topk_ids)
        return difference(found, self.expected, self.case)


def run_moves(rank: int, kinds: list[Kind]) -> list[str]:
    """What is wrong after, and between, the steps of moves through several placements."""
    groups = ParallelGroups.create(ep_size=4, timeout=30)
    found = []
    for kind in kinds:
        for placements in (WHOLE, REPLICATED) if kind == kinds[0] else (REPLICATED,):
            moving = Moving(kind, placements, groups)
            mover = ExpertMover(moving.kernel, moving.groups, moving.placements[0])
            places = [tensor.data_ptr() for _, tensor in moving.kernel.weights.tensors()]
            for new, most in zip(moving.placements[1:], (1, None), strict=True):
                for step in mover.steps(new, max_staged=most):
                    before = mover.placement
                    mover.stage(step)
                    problems = [moving.wrong(), *unlike(moving.kernel, moving.fresh(before))]
                    mover.commit()
                    problems += [moving.wrong(), *unlike(moving.kernel, moving.fresh(step))]
                    found += [f"{kind}: rank {rank}, {before} to {step}: {text}" for text in problems if text]
                if [set(held) for held in mover.placement.ranks] != [set(held) for held in new.ranks]:
                    found.append(f"{kind}: {mover.placement}, expected {new}")
            if places != [tensor.data_ptr() for _, tensor in moving.kernel.weights.tensors()]:
                found.append(f"{kind}: weights have other addresses")
    return found


def reloaded(folder: str, groups: ParallelGroups) -> str | None:
    """What is wrong with a layer of a checkpoint after its experts moved, and after it is reloaded."""
    count = load_layer(folder, device="cpu").config.num_experts
    placement = ExpertPlacement.contiguous(count, 4)
    layer = load_layer(folder, device="cpu", dtype=torch.float32, groups=groups, placement=placement)
    x = torch.randn(3, layer.config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = layer(x)
    mover = ExpertMover(layer.kernel, groups, placement)
    ranks = tuple(held[::-1] for held in ExpertPlacement.round_robin(count, 4).ranks)
    for step in mover.steps(ExpertPlacement(count, ranks)):
        mover.stage(step)
        mover.commit()
    moved = layer(x)
    for _, tensor in layer.weights.tensors():
        tensor.view(torch.uint8).zero_()
    layer.reload(folder)
    again = layer(x)
    # sums of the same products over ranks in another order
    bound = 2**-20 * float(expected.abs().max())
    if float((moved - expected).abs().max()) > bound:
        return "moved experts compute something else"
    return None if torch.equal(again, moved) else "reloaded experts are not those that moved here"


def run_failures(rank: int, kind: Kind, folder: str) -> dict[str, Any]:
    """What moves that fail leave behind; and what a layer is that is reloaded after one."""
    groups = ParallelGroups.create(ep_size=4, timeout=30)
    moving = Moving(kind, WHOLE, groups)
    old, new = moving.placements[:2]
    mover = ExpertMover(moving.kernel, moving.groups, old)
    found: dict[str, Any] = {"bytes": mover.expert_nbytes}

    # a rank without memory: all are told, the old placement goes on, and the move works later
    empty = torch.empty

    def full(*arguments: Any, **options: Any) -> torch.Tensor:
        if rank == 2:
            raise torch.OutOfMemoryError("out of memory")
        return empty(*arguments, **options)

    mover.stage(new)  # what was staged before a stage that fails is gone, too
    with mock.patch("moe_core.runtime.expert_mover.torch.empty", full):
        found["no memory"] = refusal(lambda: mover.stage(new))
    found["nothing staged"] = refusal(mover.commit)
    found["still"] = moving.wrong() or unlike(moving.kernel, moving.fresh(old))
    found["differing"] = refusal(lambda: mover.stage(old if rank == 1 else new))
    mover.stage(new)
    mover.discard()
    found["discarded"] = refusal(mover.commit)
    mover.stage(new)
    mover.commit()
    found["later"] = moving.wrong() or unlike(moving.kernel, moving.fresh(new))

    found["reloaded"] = reloaded(folder, groups.with_tokens(4))

    # what is no placement, and what are no groups, or those of another number of ranks
    known = groups.with_tokens(4)
    lists: Any = [[0, 1], [2, 3], [4, 5], [6, 7]]
    parallel: Any = known.parallel
    found["named"] = [
        refusal(lambda: load_layer(folder, device="cpu", groups=known, placement=lists)),
        refusal(lambda: load_layer(folder, device="cpu", groups=known, placement=ExpertPlacement.contiguous(8, 2))),
        refusal(lambda: load_layer(folder, device="cpu", groups=parallel)),
        refusal(lambda: shard_layer(moving.case.config, moving.weights, known)),  # type: ignore[arg-type]
        refusal(lambda: ExpertMover(moving.kernel, parallel, new)),
        refusal(lambda: ExpertMover(moving.kernel, moving.groups, lists)),
        refusal(lambda: ExpertMover(moving, moving.groups, new)),  # type: ignore[arg-type]
        refusal(lambda: ExpertMover(moving.kernel, moving.groups, new, expert_map=torch.zeros(3))),
        refusal(lambda: ExpertMover(moving.kernel, moving.groups, new, expert_map=torch.zeros(8))),
        refusal(lambda: mover.stage(lists)),
        refusal(lambda: mover.steps(lists)),
    ]

    # what is refused before anything is sent
    found["experts"] = refusal(lambda: mover.stage(ExpertPlacement.contiguous(9, 4)))
    found["ranks"] = refusal(lambda: mover.stage(ExpertPlacement.contiguous(8, 2)))
    found["old"] = refusal(lambda: ExpertMover(moving.kernel, moving.groups, old))
    bare = moving.make(new)
    bare.prepare_finalize = None
    found["placements"] = refusal(lambda: ExpertMover(bare, moving.groups, new if rank else old))
    bare.weights = replace(bare.weights, extra={"x_scale": torch.tensor([1.0, 2.0, float(rank)])})
    found["shared"] = refusal(lambda: ExpertMover(bare, moving.groups, new))
    bare.weights = replace(bare.weights, extra={"x_scale": torch.tensor([1.0, 2.0, 3.0])})

    # an expert map follows, and cannot stand for replicas
    found["unmapped"] = refusal(lambda: ExpertMover(bare, moving.groups, new))
    expert_map = new.expert_map(rank)
    mapped = ExpertMover(bare, moving.groups, new, expert_map=expert_map)
    twice = ExpertPlacement(8, ((7, 4, 0), (1, 0), (2, 6), (3, 5)))
    found["sizes"] = refusal(lambda: mapped.stage(twice))
    mapped.stage(old.aligned(new))
    mapped.commit()
    found["map"] = torch.equal(expert_map, old.aligned(new).expert_map(rank))

    # a rank that is not there: the others are told in time, and have their weights
    fresh = moving.fresh(new)
    late = ExpertMover(moving.kernel, ParallelGroups.create(ep_size=4, timeout=1).with_tokens(4), new)
    if rank == 3:
        time.sleep(2)
    else:
        started = time.monotonic()
        found["missing"] = refusal(lambda: late.stage(old))
        found["seconds"] = time.monotonic() - started
        found["missing still"] = unlike(moving.kernel, fresh)
    return found


def run_graphs(rank: int) -> list[str]:
    """What is wrong with replays of a graph of this rank's experts, on a GPU, while experts come and go."""
    device = torch.device("cuda", rank)
    groups = ParallelGroups.create(ep_size=2, timeout=60)
    old, new = ExpertPlacement.contiguous(8, 2), ExpertPlacement(8, ((5, 0, 7, 2), (4, 1, 6, 3)))
    found = []
    for kind in some_kinds():
        config = kind.config(num_experts=8)
        weights = kind.weights(config).to(device)
        x = torch.randn(16, config.hidden_size, device=device, dtype=config.dtype)
        topk_weights, topk_ids = torch.rand(16, 8, device=device).topk(config.top_k)

        def layer(placement: ExpertPlacement, weights: MoEWeights = weights, kind: Kind = kind) -> FusedMoELayer:
            part = shard_layer(
                kind.config(num_experts=8), weights, groups.parallel, experts=placement.ranks[groups.parallel.ep_rank]
            )
            return FusedMoELayer.from_weights(
                kind.scheme, part.config, part.weights, expert_map=part.expert_map, copy=True
            )

        def expected(placement: ExpertPlacement) -> torch.Tensor:
            return layer(placement)(x, topk_weights=topk_weights, topk_ids=topk_ids)  # noqa: B023 - called in this turn

        mine = layer(old)
        mover = ExpertMover(mine.kernel, groups, old, expert_map=mine.expert_map)
        for _ in range(2):
            mine(x, topk_weights=topk_weights, topk_ids=topk_ids)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = mine(x, topk_weights=topk_weights, topk_ids=topk_ids)
        side = torch.cuda.Stream()
        for step in mover.steps(new, max_staged=2):
            with torch.cuda.stream(side):
                mover.stage(step)
            graph.replay()
            if not torch.equal(out, expected(mover.placement)):
                found.append(f"{kind}: rank {rank}: staging changed a replay")
            mover.commit()
        graph.replay()
        # local experts stand in another order, which changes nothing: each token's sum is over its slots
        if not torch.equal(out, expected(new)):
            found.append(f"{kind}: rank {rank}: a replay after the move differs from a layer that was made so")
    return found
