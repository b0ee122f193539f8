"""Two ranks of INT8 layers whose calls differ: in their layer, in the number of tokens, in what the callers state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import moe_core as mc
import torch
from moe_core.parallel.distributed.host_numbers import HostNumbers
from torch import Tensor

CONFIG = mc.FusedMoEConfig(num_experts=6, top_k=2, hidden_size=32, intermediate_size=32, dtype="float32")  # type: ignore[arg-type]


def weights_of(seed: int) -> mc.MoEWeights:
    generator = torch.Generator().manual_seed(seed)

    def codes(*shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)

    return mc.MoEWeights(
        weight_key=mc.kInt8StaticChannelSym,
        activation_key=None,
        w13=codes(6, 64, 32),
        w2=codes(6, 32, 32),
        w13_scale=torch.full((6, 64, 1), 0.01),
        w2_scale=torch.full((6, 32, 1), 0.01),
    )


def layer_of(groups: mc.ParallelGroups, seed: int) -> mc.FusedMoELayer:
    part = mc.shard_layer(CONFIG, weights_of(seed), groups.parallel)
    return mc.FusedMoELayer.from_weights("int8", part.config, part.weights, groups=groups)


def whole(seed: int) -> mc.FusedMoELayer:
    return mc.FusedMoELayer.from_weights("int8", CONFIG, weights_of(seed))


def tokens(count: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = (
        torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(count)]) if count else torch.empty(0, 2)
    )
    return {
        "hidden_states": torch.randn(count, 32, generator=generator),
        "topk_weights": torch.rand(count, 2, generator=generator),
        "topk_ids": ids.long(),
    }


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except mc.MoEError as error:
        return f"{type(error).__name__}: {error.message}"
    return "nothing"


def close(found: Tensor, expected: Tensor) -> bool:
    # float32 sums of 32 products each, in another order
    return bool((found - expected).abs().max() <= 64 * 2**-24 * expected.abs().max())


def same(layer: mc.FusedMoELayer, seed: int, given: dict[str, Tensor], **more: Any) -> str:
    return "same" if close(layer(**given, **more), whole(seed)(**given)) else "other"


def counts(rank: int, all2all: str) -> list[str]:
    """What comes of token counts that differ between ranks; last, of right ones."""
    groups = mc.ParallelGroups.create(ep_size=2, dp_size=2, all2all_backend=all2all, timeout=5)
    layer, given, right = layer_of(groups, 0), tokens((3, 5)[rank], rank), [3, 5]
    stated: list[tuple[Any, Any]] = [
        ([3, 9], right),
        ([3, 4], right),
        ([9, 5], right),
        ([9, 5], [9, 5]),
        ([3], right),
        (right, [3, 5, 0]),
        ([3, 9], None),
        (None, [4, 5]),
    ]
    found = [told(lambda both=both: layer(**given, tokens_per_rank=both[rank])) for both in stated]  # type: ignore[misc]
    good: list[tuple[Any, Any]] = [(None, right), (right, right), (right, None)]
    return [*found, *(same(layer, 0, given, tokens_per_rank=both[rank]) for both in good)]


def layers(rank: int, sizes: dict[str, Any], **more: Any) -> list[str]:
    """Ranks in calls of two layers of equal shape; then both in the same layer's."""
    groups = mc.ParallelGroups.create(timeout=5, **sizes)
    both = [layer_of(groups, seed) for seed in range(2)]
    given = tokens(4, rank if groups.parallel.dp_size > 1 else 0)
    return [
        told(lambda: both[rank](**given, **more)),
        same(both[1], 1, given, **more),
        told(lambda: both[1 - rank](**given, **more)),
        same(both[0], 0, given, **more),
    ]


def shared_tokens(rank: int, sizes: dict[str, Any]) -> list[str]:
    """Ranks that should have the same tokens, and have other numbers of them."""
    groups = mc.ParallelGroups.create(timeout=5, **sizes)
    layer = layer_of(groups, 0)
    found = [told(lambda both=both: layer(**tokens(both[rank], 0))) for both in ((3, 5), (0, 2), (2, 0))]  # type: ignore[misc]
    return [*found, same(layer, 0, tokens(3, 0))]


def names(rank: int) -> list[str]:
    """Layers of one shape and other names, which the ranks make together."""
    groups = mc.ParallelGroups.create(dp_size=2, timeout=5)
    part = mc.shard_layer(CONFIG, weights_of(0), groups.parallel)
    oracle = mc.registry().oracle("int8")
    selection = oracle.select(part.config, weight_key=part.weights.weight_key, activation_key=None)
    converted = oracle.convert(selection, part.weights)
    return [
        told(partial(oracle.make_kernel, selection, converted, groups=groups, layer=f"layers.{each}"))
        for each in (rank, 0)
    ]


def maps(rank: int) -> list[str]:
    """Layers of ranks with the same tokens that are given no expert map."""
    groups = mc.ParallelGroups.create(ep_size=2, timeout=5)
    found = []
    for experts in (None, (0, 1)):
        part = mc.shard_layer(CONFIG, weights_of(0), groups.parallel, experts=experts)
        found.append(told(partial(mc.FusedMoELayer.from_weights, "int8", part.config, part.weights, groups=groups)))
    layer = layer_of(groups, 0)
    return [*found, told(partial(mc.FusedMoELayer, layer.kernel, layer.selection))]


def every(rank: int) -> dict[str, Any]:
    reducing = {"ep_size": 2}, {"tp_size": 2}, {"ep_size": 2, "all2all_backend": "reduce_scatter"}
    crossing = {"dp_size": 2}, {"dp_size": 2, "all2all_backend": "alltoall"}
    return {
        "counts": [counts(rank, all2all) for all2all in ("allgather_reducescatter", "alltoall")],
        "layers": [
            *(layers(rank, sizes) for sizes in crossing),
            *(layers(rank, sizes, tokens_per_rank=[4, 4]) for sizes in crossing),
            *(layers(rank, sizes) for sizes in reducing[:2]),
        ],
        "shared tokens": [shared_tokens(rank, sizes) for sizes in reducing[:2]],
        "scattered": scattered(rank, reducing[2]),
        "names": names(rank),
        "maps": maps(rank),
        "hosts": over_hosts(rank),
    }


def over_hosts(rank: int) -> dict[str, Any]:
    """As of :func:`every`, of ranks that share no memory."""
    with mock.patch.object(HostNumbers, "connect", return_value=None):
        return {"counts": [counts(rank, "alltoall")], "layers": [layers(rank, {"dp_size": 2})]}


def scattered(rank: int, sizes: dict[str, Any]) -> list[str]:
    groups = mc.ParallelGroups.create(timeout=5, **sizes)
    layer, given = layer_of(groups, 0), tokens(4, 0)
    return [
        told(lambda: layer(**tokens((4, 3)[rank], 0))),
        str(close(layer(**given), whole(0)(**given)[2 * rank : 2 * rank + 2])),
    ]
