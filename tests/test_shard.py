"""A rank's part of a layer: values, the sum over ranks, what cannot be plan; from tensors and from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from moe_core import (
    ConfigError,
    FusedMoEConfig,
    FusedMoELayer,
    FusedMoEParallelConfig,
    MoEWeights,
    dequantize_weight,
    load_layer,
    registry,
    shard_layer,
)
from moe_core.parallel.shard_plan import shard_plans
from moe_core.testing.data import make_weights
from moe_core_layers import Kind, all_kinds
from torch import Tensor

E, K = 4, 256


def config(size: int = 512, *, bias: bool = True, gated: bool = True) -> FusedMoEConfig:
    return FusedMoEConfig(
        num_experts=E,
        top_k=2,
        hidden_size=K,
        intermediate_size=size,
        dtype=torch.float32,
        has_bias=bias,
        activation="silu" if gated else "relu2_no_mul",
    )


def values(weights: MoEWeights, name: str, parts: int) -> Tensor:
    """[E, rows, columns] of one matrix, dequantized."""
    tensor, key = getattr(weights, name), weights.weight_key
    if key is None:
        return tensor
    zero_point, g_idx = getattr(weights, f"{name}_zero_point"), getattr(weights, f"{name}_g_idx")
    return dequantize_weight(
        tensor, getattr(weights, f"{name}_scale"), key, zero_point=zero_point, g_idx=g_idx, parts=parts
    )


def kinds() -> list[Kind]:
    """Every weight key, as it is, in activation order and with scaled inputs where the torch backend takes that."""
    found = {kind.weight_key: kind for kind in all_kinds()}
    wna16 = [kind for kind in found.values() if kind.scheme == "wna16"]
    ordered = [replace(kind, weight_key=replace(kind.weight_key, permuted=True)) for kind in wna16]
    scaled = [replace(kind, weight_key=replace(kind.weight_key, pre_scaled=True)) for kind in wna16[:1]]
    return [*found.values(), *ordered, *scaled]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("tp", "size"), [(2, 512), (4, 512), (2, 384), (3, 448)])
@pytest.mark.parametrize("kind", kinds(), ids=str)
@pytest.mark.diagonal(3)
def test_ranks_hold_the_values_of_the_whole_layer(kind: Kind, tp: int, size: int, gated: bool) -> None:
    """Columns of the ranks, one behind the other, are the layer's; every tensor fits the rank's config."""
    whole = config(size, gated=gated)
    parts = 2 if gated else 1
    weights = make_weights(whole, kind.weight_key, kind.activation_key, seed=tp)
    shards = [shard_layer(whole, weights, FusedMoEParallelConfig(tp_size=tp, tp_rank=rank)) for rank in range(tp)]
    for shard in shards:
        shard.weights.validate(shard.config)
        assert shard.expert_map is None
        assert shard.weights.w2.is_contiguous()
        assert shard.weights.w13.is_contiguous()
    assert sum(shard.config.intermediate_size for shard in shards) == size
    w13 = [values(shard.weights, "w13", parts).unflatten(1, (parts, -1)) for shard in shards]
    assert torch.equal(torch.cat(w13, 2).flatten(1, 2), values(weights, "w13", parts))
    assert torch.equal(torch.cat([values(shard.weights, "w2", 1) for shard in shards], 2), values(weights, "w2", 1))
    biases = [shard.weights.w13_bias.unflatten(1, (parts, -1)) for shard in shards]
    assert torch.equal(torch.cat(biases, 2).flatten(1, 2), weights.w13_bias)
    assert torch.equal(torch.stack([shard.weights.w2_bias for shard in shards]).sum(0), weights.w2_bias)
    if weights.w2_pre_scale is not None:
        assert torch.equal(torch.cat([shard.weights.w2_pre_scale for shard in shards], 1), weights.w2_pre_scale)


def outputs(scheme: str, parts: list[tuple[FusedMoEConfig, MoEWeights, Tensor | None]]) -> list[Tensor]:
    """What each of the layers makes of the same tokens."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(5, K, generator=generator)
    topk_weights, topk_ids = torch.rand(5, E, generator=generator).topk(2)
    return [
        FusedMoELayer.from_weights(scheme, part, weights, expert_map=expert_map)(
            x, topk_weights=topk_weights, topk_ids=topk_ids
        )
        for part, weights, expert_map in parts
    ]


# with 16-bit activations, or groups that no rank plans, ranks compute with the same numbers
EXACT = [
    ("fp8", "kFp8Static128BlockSym", "kFp8Dynamic128Sym"),
    ("fp8", "kFp8StaticTensorSym", "kFp8StaticTensorSym"),
    ("int8", "kInt8StaticChannelSym", None),
    ("wna16", "kInt4StaticAsym", None),
    ("mxfp4", "kMxfp4Static", "kMxfp8Dynamic"),
]


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize(("scheme", "weight_key", "activation_key"), EXACT)
@pytest.mark.diagonal(2)
def test_outputs_of_the_ranks_add_up(
    scheme: str, weight_key: str, activation_key: str | None, tp: int, ep: int
) -> None:
    whole = config(384)
    empty = torch.zeros(0)
    keys = MoEWeights(weight_key=weight_key, activation_key=activation_key, w13=empty, w2=empty)
    weights = make_weights(whole, keys.weight_key, keys.activation_key, seed=3)
    shards = [
        shard_layer(whole, weights, FusedMoEParallelConfig(tp_size=tp, tp_rank=i, ep_size=ep, ep_rank=j))
        for i in range(tp)
        for j in range(ep)
    ]
    [expected] = outputs(scheme, [(whole, weights, None)])
    found = torch.stack(outputs(scheme, [(s.config, s.weights, s.expert_map) for s in shards])).sum(0)
    # float32 sums of N terms in another order differ by N steps of the sum of their absolute values, which for random
    # signs is some sqrt(N) times the sum
    bound = whole.intermediate_size**1.5 * 2**-24 * expected.abs().amax()
    assert float((found - expected).abs().amax()) <= float(bound)


def test_experts_are_consecutive_or_those_that_are_named() -> None:
    whole = config(bias=False)
    weights = make_weights(whole, None, None, seed=0)
    for rank, experts in ((0, (0, 1)), (1, (2,)), (2, (3,))):
        shard = shard_layer(whole, weights, FusedMoEParallelConfig(ep_size=3, ep_rank=rank))
        assert shard.experts == experts
        assert torch.equal(shard.weights.w13, weights.w13[list(experts)])
    named = shard_layer(whole, weights, FusedMoEParallelConfig(ep_size=2, ep_rank=1), experts=[3, 0])
    # in the order given, which is that of the weights and of the map
    assert named.experts == (3, 0)
    assert torch.equal(named.weights.w2, weights.w2[[3, 0]])
    assert named.expert_map is not None
    assert named.expert_map.tolist() == [1, -1, -1, 0]
    assert named.config.num_local_experts == 2


@pytest.mark.parametrize(
    ("size", "key", "ranks"),
    [(256, True, 2), (512, True, 4), (512, False, 2)],
    ids=["of fewer columns", "of more ranks", "without keys"],
)
def test_a_cut_of_another_layer_is_refused(size: int, key: bool, ranks: int) -> None:
    kind = next(kind for kind in all_kinds() if kind.weight_key is not None and kind.activation_key is not None)
    weights = make_weights(config(), kind.weight_key, kind.activation_key, seed=0)
    (plan, *_) = shard_plans(size, kind.weight_key if key else None, kind.activation_key if key else None, ranks)
    with pytest.raises(ConfigError, match=rf"{ranks} ranks.*tp_size"):
        shard_layer(config(), weights, FusedMoEParallelConfig(tp_size=2), plan=plan)


def test_what_cannot_be_cut_is_refused() -> None:
    whole = config(bias=False)
    weights = make_weights(whole, None, None, seed=0)
    key = next(kind.weight_key for kind in all_kinds() if kind.scheme == "fp8")
    blocks = make_weights(config(256), key, None, seed=0)
    with pytest.raises(ConfigError, match="tp_size 5 .*256"):
        shard_layer(config(256), blocks, FusedMoEParallelConfig(tp_size=5))
    with pytest.raises(ConfigError, match="4 experts .*ep_size"):
        shard_layer(whole, weights, FusedMoEParallelConfig(ep_size=5, ep_rank=4))
    with pytest.raises(ConfigError, match=r"experts .*\[4\]"):
        shard_layer(whole, weights, FusedMoEParallelConfig(ep_size=2), experts=[4])
    part = shard_layer(whole, weights, FusedMoEParallelConfig(ep_size=2))
    with pytest.raises(ConfigError, match="num_local_experts .*4 experts"):
        shard_layer(part.config, part.weights, FusedMoEParallelConfig(ep_size=2))


@pytest.mark.parametrize("again", [{"tp_size": 2}, {"ep_size": 2}], ids=str)
def test_a_part_is_not_cut_again(again: dict[str, int]) -> None:
    weights = make_weights(config(), None, None, seed=0)
    part = shard_layer(config(), weights, FusedMoEParallelConfig(tp_size=2, tp_rank=1))
    with pytest.raises(ConfigError, match="256 columns"):
        shard_layer(part.config, part.weights, FusedMoEParallelConfig(**again))


@pytest.mark.parametrize("scheme", registry().scheme_names())
def test_a_rank_loads_its_part_of_a_checkpoint_and_reloads_it(scheme: str, tmp_path: Path) -> None:
    registry().scheme(scheme).write_quickstart(tmp_path)
    whole = load_layer(tmp_path, device="cpu", dtype=torch.float32)
    ranks = [
        load_layer(
            tmp_path,
            device="cpu",
            dtype=torch.float32,
            parallel=FusedMoEParallelConfig(tp_size=2, tp_rank=i, ep_size=2, ep_rank=j),
        )
        for i in range(2)
        for j in range(2)
    ]
    x = torch.randn(4, whole.config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = whole(x)
    found = torch.stack([rank(x) for rank in ranks]).sum(0)
    # dynamic scales of a token's activations may see the rank's columns alone
    step = 2**-4 if whole.selection.activation_key is not None else 2**-16
    assert float((found - expected).norm()) <= step * float(expected.norm())
    for rank in ranks:
        assert rank.config.intermediate_size < whole.config.intermediate_size
        for _, tensor in rank.weights.tensors():
            tensor.view(torch.uint8).zero_()
        assert not rank(x).any()
        rank.reload(tmp_path)
    assert torch.equal(torch.stack([rank(x) for rank in ranks]).sum(0), found)
