"""How columns are shared among ranks: balance, the same values by finer groups, what a device's kernels take."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_core import (
    ConfigError,
    FusedMoEConfig,
    FusedMoELayer,
    FusedMoEParallelConfig,
    GroupShape,
    MoEWeights,
    QuantKey,
    SelectionError,
    dequantize_weight,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kInt4Static,
    kInt4StaticAsym,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTokenSym,
    kInt8StaticAsym,
    kInt8StaticChannelSym,
    kMxfp4Static,
    kMxfp8Dynamic,
    kMxfp8Static,
    registry,
)
from moe_core.parallel.shard import shard_layer
from moe_core.parallel.shard_plan import ShardPlan, default_plan, refine, shard_plans
from moe_core.selection.column_choice import select_plan
from moe_core.testing.data import make_weights
from torch import Tensor

KEYS: list[tuple[str, QuantKey, QuantKey | None]] = [
    ("fp8", kFp8Static128BlockSym, kFp8Dynamic128Sym),
    ("fp8", kFp8Static128BlockSym, None),
    ("fp8", kFp8StaticChannelSym, None),
    ("fp8", kMxfp8Static, kMxfp8Dynamic),
    ("int8", kInt8StaticChannelSym, None),
    ("mxfp4", kMxfp4Static, None),
    *(("wna16", key, None) for key in (kInt4Static, kInt4StaticAsym, kInt8StaticAsym)),
    *(("wna16", replace(key, permuted=True), None) for key in (kInt4Static, kInt4StaticAsym)),
    ("wna16", replace(kInt4Static, pre_scaled=True), None),
]


def plans_of(size: int, tp: int, key: QuantKey | None = kFp8Static128BlockSym) -> list[str]:
    return [str(plan) for plan in shard_plans(size, key, kFp8Dynamic128Sym, tp)]


def test_shares_that_part_no_group_are_the_only_ones() -> None:
    assert plans_of(1024, 4) == ["256 columns each"]
    [plan] = shard_plans(1024, kFp8Static128BlockSym, kFp8Dynamic128Sym, 4)
    assert plan == ShardPlan(((0, 256), (256, 512), (512, 768), (768, 1024)), kFp8Static128BlockSym, kFp8Dynamic128Sym)


def test_shares_that_part_groups_are_equal_by_finer_ones_or_uneven() -> None:
    """192 columns for each of eight ranks with 128-wide blocks, and others."""
    assert plans_of(1536, 8) == ["192 columns each, scales repeated for groups of 64x64", "128 or 256"]
    fine, whole = shard_plans(1536, kFp8Static128BlockSym, kFp8Dynamic128Sym, 8)
    assert (fine.weight_key, fine.activation_key) == (
        kFp8Static128BlockSym.with_group(64, 64),
        kFp8Dynamic64Sym,
    )
    assert whole.weight_key == kFp8Static128BlockSym
    assert default_plan((fine, whole)) == whole
    # equal shares of 96 need groups of 32; groups of 64 leave some ranks with more
    assert plans_of(768, 8) == [
        "96 columns each, scales repeated for groups of 32x32",
        "64 or 128, scales repeated for groups of 64x64",
    ]
    assert plans_of(320, 2) == [
        "160 columns each, scales repeated for groups of 32x32",
        "128 or 192, scales repeated for groups of 64x64",
        "64 or 256",
    ]


@pytest.mark.parametrize(
    ("size", "key", "tp", "equal", "groups", "fewer"),
    [
        (100, kFp8Static128BlockSym, 3, "it does not divide by that", 2, 2),
        # of columns with a scale of their own there are 100
        (100, kFp8StaticChannelSym, 3, "it does not divide by that", 2, 2),
        # of groups of 32 there are five
        (160, kMxfp4Static, 4, "equal shares of 40 columns part groups of 32", 3, 3),
        # of words of two codes there are three
        (6, kInt4Static, 2, "equal shares of 3 columns part groups of 2", 1, 1),
        # 96 ranks have a column each
        (96, kFp8StaticChannelSym, 97, "it does not divide by that", 2, 96),
    ],
)
def test_too_many_ranks_are_told_what_there_is(
    size: int, key: QuantKey, tp: int, equal: str, groups: int, fewer: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        shard_plans(size, key, None, tp)
    assert str(caught.value) == (
        f"tp_size {tp} cannot share an intermediate size of {size}: {equal}, and uneven shares are multiples of 64 "
        f"columns, of which it has {groups}; the next smaller tp_size that can is {fewer}, or spread the experts "
        "instead (ep_size)"
    )
    assert shard_plans(size, key, None, fewer)


def test_the_coarsest_groups_are_the_plainest() -> None:
    """Where no whole groups go around."""
    assert str(default_plan(shard_plans(768, kFp8Static128BlockSym, kFp8Dynamic128Sym, 8))) == (
        "64 or 128, scales repeated for groups of 64x64"
    )
    # of the same groups, equal shares
    permuted = replace(kInt4Static, permuted=True)
    assert str(default_plan(shard_plans(1536, permuted, None, 16))) == "96 columns each"


def test_columns_in_any_order_are_shared_as_they_are() -> None:
    assert plans_of(1536, 16, replace(kInt4Static, permuted=True)) == [
        "96 columns each, scales repeated for groups of 1x128",
        "64 or 128, scales repeated for groups of 1x128",
    ]
    assert [str(plan) for plan in shard_plans(1536, replace(kInt4Static, permuted=True), None, 16)] == [
        "96 columns each"
    ]


def values(weights: MoEWeights, name: str, parts: int) -> Tensor:
    """[E, rows, columns] of one matrix, dequantized."""
    assert weights.weight_key is not None
    return dequantize_weight(
        getattr(weights, name),
        getattr(weights, f"{name}_scale"),
        weights.weight_key,
        zero_point=getattr(weights, f"{name}_zero_point"),
        g_idx=getattr(weights, f"{name}_g_idx"),
        parts=parts,
        cols=weights.w2.shape[2] * (weights.weight_key.packing.values_per_word if weights.weight_key.packing else 1)
        if name == "w2"
        else None,
    )


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, QuantKey, QuantKey | None, int, int, bool]:
    """Keys, a size and a number of ranks."""
    scheme, key, activation = draw(st.sampled_from(KEYS))
    if scheme == "wna16":
        key = key.with_group(1, draw(st.sampled_from((32, 64, 128))))
    # what the formats themselves ask for: whole groups of MX scales, words of two codes
    step = 32 if key.scale.dtype is torch.uint8 else 2
    size = step * draw(st.integers(64 // step, 512 // step))
    return scheme, key, activation, size, draw(st.integers(2, 5)), draw(st.booleans())


@settings(deadline=None)
@given(request=requests(), data=st.data())
def test_ranks_have_the_layers_values_and_their_outputs_add_up(
    request: tuple[str, QuantKey, QuantKey | None, int, int, bool], data: st.DataObject
) -> None:
    scheme, key, activation, size, tp, gated = request
    whole = FusedMoEConfig(
        num_experts=2,
        top_k=2,
        hidden_size=128,
        intermediate_size=size,
        dtype=torch.float32,
        has_bias=True,
        activation="silu" if gated else "relu2_no_mul",
    )
    weights = make_weights(whole, key, activation, seed=size)
    try:
        plans = shard_plans(size, key, activation, tp)
    except ConfigError:
        assert size < 128 * tp
        return
    plan = data.draw(st.sampled_from(plans))
    ranges = plan.ranges
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))
    shards = [shard_layer(whole, weights, FusedMoEParallelConfig(tp_size=tp, tp_rank=r), plan=plan) for r in range(tp)]
    parts = 2 if gated else 1
    for shard, (begin, end) in zip(shards, ranges, strict=True):
        shard.weights.validate(shard.config)
        mine = values(shard.weights, "w13", parts).view(2, parts, -1, 128)
        assert torch.equal(mine, values(weights, "w13", parts).view(2, parts, -1, 128)[:, :, begin:end])
        assert torch.equal(values(shard.weights, "w2", 1)[..., : end - begin], values(weights, "w2", 1)[..., begin:end])
    generator = torch.Generator().manual_seed(tp)
    x = torch.randn(3, 128, generator=generator)
    topk_weights, topk_ids = torch.rand(3, 2, generator=generator).topk(2)

    def output(config: FusedMoEConfig, held: MoEWeights) -> Tensor:
        layer = FusedMoELayer.from_weights(scheme, config, held, backend="torch")
        return layer(x, topk_weights=topk_weights, topk_ids=topk_ids)

    try:
        found = torch.stack([output(shard.config, shard.weights) for shard in shards]).sum(0)
    except SelectionError:
        assert plan.refined  # groups that no backend takes: selection goes on to the next way
        return
    expected = output(whole, weights)
    # float32 sums of N terms in another order, see test_shard; quantized activations may then round to the next code,
    # which is a step of e4m3 (2**-3 of the value); in finer groups x and h have an error of half a step in either run,
    # and gate and up are multiplied
    step = size**1.5 * 2**-24 if activation is None else 2**-3 if not plan.refined else 4 * 2**-4
    assert float((found - expected).norm()) <= step * float(expected.norm())


def config(size: int = 1536) -> FusedMoEConfig:
    return FusedMoEConfig(
        num_experts=8,
        top_k=2,
        hidden_size=2048,
        intermediate_size=size,
        parallel=FusedMoEParallelConfig(tp_size=8, tp_rank=7),
    )


@pytest.mark.parametrize(
    ("device", "size", "shares"),
    [
        ("h200", 1536, "192 columns each, scales repeated for groups of 64x64"),  # Triton takes 64x64 blocks
        ("h200", 768, "64 or 128, scales repeated for groups of 64x64"),  # and none of 32x32
        ("h200", 2048, "256 columns each"),
        ("cpu", 1536, "192 columns each, scales repeated for groups of 64x64"),
    ],
)
def test_the_most_balanced_shares_that_a_kernel_takes_are_chosen(device: str, size: int, shares: str) -> None:
    plans = shard_plans(size, kFp8Static128BlockSym, kFp8Dynamic128Sym, 8)
    plan, selection = select_plan(registry().oracle("fp8"), config(size), plans, device=device)
    assert str(plan) == shares
    begin, end = plan.ranges[7]
    assert selection.report.config.intermediate_size == end - begin
    assert selection.weight_key == plan.weight_key


def test_a_backend_that_takes_no_finer_groups_gets_whole_ones() -> None:
    plans = shard_plans(1536, kFp8Static128BlockSym, kFp8Dynamic128Sym, 8)
    plan, selection = select_plan(registry().oracle("fp8"), config(), plans, moe_backend="torch", device="h200")
    assert str(plan) == "128 or 256"
    assert selection.backend == "torch"


@pytest.mark.parametrize("tp_rank", range(8))
def test_parts_without_whole_groups_are_ones_that_torch_takes(tp_rank: int) -> None:
    """768 columns among eight ranks: 96 each would need groups of 32, which no backend of blocks takes."""
    parallel = FusedMoEParallelConfig(tp_size=8, tp_rank=tp_rank)
    keys = kFp8Static128BlockSym, kFp8Dynamic128Sym
    whole = FusedMoEConfig(num_experts=1, top_k=1, hidden_size=128, intermediate_size=768)
    shard = shard_layer(whole, make_weights(whole, *keys, seed=0), parallel)
    layer = FusedMoELayer.from_weights("fp8", shard.config, shard.weights, backend="torch")
    assert layer.config.intermediate_size in (64, 128)
    part = replace(config(768), parallel=parallel)
    plan, selection = select_plan(
        registry().oracle("fp8"), part, shard_plans(768, *keys, 8), moe_backend="torch", device="h200"
    )
    assert str(plan) == "64 or 128, scales repeated for groups of 64x64"
    assert selection.backend == "torch"


def test_finer_groups_are_tried_where_no_backend_takes_the_plainest() -> None:
    """A backend of a device without kernels takes 1x32 alone."""
    keys = kInt4W4A8StaticGroup128Sym, kInt8DynamicTokenSym
    plans = (
        ShardPlan(((0, 48), (48, 192)), keys[0], keys[1]),
        ShardPlan(((0, 96), (96, 192)), keys[0].with_group(1, 32), keys[1], refined=True),
    )
    two = replace(config(192), parallel=FusedMoEParallelConfig(tp_size=2))
    # int8's torch takes whole groups: 48 columns are none of 128
    plan, _ = select_plan(registry().oracle("int8"), two, plans, moe_backend="torch", device="h200")
    assert plan == plans[1]
    with pytest.raises(SelectionError, match="multiple of 128"):
        select_plan(registry().oracle("int8"), two, plans[:1], moe_backend="torch", device="h200")


def test_scales_are_repeated_at_partial_groups() -> None:
    whole = FusedMoEConfig(num_experts=1, top_k=1, hidden_size=200, intermediate_size=192, dtype=torch.float32)
    weights = make_weights(whole, kFp8Static128BlockSym, None, seed=0)
    fine = refine(whole, weights, kFp8Static128BlockSym.with_group(64, 32))
    fine.validate(whole)
    assert fine.weight_key is not None
    assert fine.weight_key.group_shape == GroupShape(64, 32)
    assert torch.equal(values(fine, "w13", 2), values(weights, "w13", 2))
    assert torch.equal(values(fine, "w2", 1), values(weights, "w2", 1))
