"""The allowed error: what it follows from, and that sound results keep within it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from moe_core import (
    ActivationParams,
    FusedMoEConfig,
    MoEActivation,
    QuantKey,
    fused_moe_reference,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kFp8StaticTensorSym,
    kInt8DynamicTokenSym,
    kInt8Static,
    kInt8StaticChannelSym,
    kMxfp4Static,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from moe_core.reference.quantization import quantize_moe_weights
from moe_core.reference.tolerance import FACTOR, Rounding
from moe_core.spec.quant_key import NAMES
from moe_core.testing import Expected, expected_output, make_inputs, make_weights

KEYS: list[tuple[QuantKey | None, QuantKey | None]] = [
    (None, None),
    (kFp8Static128BlockSym, kFp8Dynamic128Sym),
    (kFp8StaticTensorSym, kFp8StaticTensorSym),
    (kMxfp8Static, kMxfp8Dynamic),
    (kMxfp4Static, None),
    (kInt8StaticChannelSym, kInt8DynamicTokenSym),
]
IDS = [f"{NAMES.get(w, '16bit')}-{NAMES.get(a, '16bit')}" for w, a in KEYS]  # type: ignore[arg-type]


def plain_expected(config: FusedMoEConfig, keys: tuple[QuantKey | None, QuantKey | None], seed: int):  # type: ignore[no-untyped-def]
    """As ``expected_for``, of normal data without outliers, whose sums scatter little."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.full((config.local_experts,), 0.01) if keys[1] is not None and keys[1].is_static else None
    weights = quantize_moe_weights(
        torch.randn(config.local_experts, config.w13_rows, config.hidden_size, generator=generator) * 0.1,
        torch.randn(config.local_experts, config.hidden_size, config.intermediate_size, generator=generator) * 0.1,
        gated=config.is_gated,
        weight_key=keys[0],
        activation_key=keys[1],
        w13_input_scale=scales,
        w2_input_scale=scales,
    )
    x = torch.randn(64, config.hidden_size, generator=generator).to(config.dtype)
    arguments = {
        "topk_weights": torch.rand(64, config.top_k, generator=generator) + 0.5,
        # distinct, as routers make them: the errors of one expert met twice would add up
        "topk_ids": torch.rand(64, config.num_experts, generator=generator).topk(config.top_k).indices,
    }
    return expected_output(x, weights, config, **arguments), (x, weights, config), arguments


def expected_for(config: FusedMoEConfig, keys: tuple[QuantKey | None, QuantKey | None], tokens: int, seed: int):  # type: ignore[no-untyped-def]
    weights, inputs = make_weights(config, *keys, seed=seed), make_inputs(config, tokens, seed=seed)
    arguments = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids, "expert_map": inputs.expert_map}
    return expected_output(inputs.x, weights, config, **arguments), (inputs.x, weights, config), arguments


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("keys", KEYS, ids=IDS)
def test_the_yardsticks_own_error_is_what_the_model_says(
    keys: tuple[QuantKey | None, QuantKey | None], dtype: torch.dtype
) -> None:
    """The norm that the model finds typical is the yardstick's: nothing is missing, little is added."""
    config = FusedMoEConfig(4, 2, 160, 136, dtype=dtype)
    typical = yardsticks = 0.0
    for seed in range(3):
        expected, what, arguments = plain_expected(config, keys, seed)
        yardstick = fused_moe_reference(*what, **arguments, compute_dtype=dtype)
        assert expected.yardstick == float((yardstick - expected.exact).norm())
        assert torch.equal(expected.exact, fused_moe_reference(*what, **arguments))
        expected.compare(yardstick, "the yardstick")
        expected.compare(expected.exact.to(dtype), "the rounded reference")
        assert expected.typical < expected.floor
        # the yardstick is a sound implementation itself
        assert expected.yardstick < expected.floor
        typical, yardsticks = typical + expected.typical**2, yardsticks + expected.yardstick**2
    if keys[1] is not kMxfp8Dynamic:  # where a few scales that double are most of the error
        assert 0.75 < math.sqrt(typical / yardsticks) < 1.25


def test_large_batches_are_judged_by_the_factor() -> None:
    expected, *_ = expected_for(FusedMoEConfig(4, 2, 256, 128), (None, None), 257, 0)
    assert expected.floor < FACTOR * expected.yardstick
    assert expected.limit == FACTOR * expected.yardstick


@pytest.mark.parametrize("keys", KEYS, ids=IDS)
def test_more_error_than_allowed_is_told(keys: tuple[QuantKey | None, QuantKey | None]) -> None:
    expected, *_ = expected_for(FusedMoEConfig(4, 2, 192, 160), keys, 33, 1)
    sound = expected.exact.bfloat16()
    noise = torch.randn(sound.shape, generator=torch.Generator().manual_seed(2)).double()
    with pytest.raises(AssertionError, match="x .*torch"):
        expected.compare(expected.exact + noise * 1.2 * expected.limit / noise.norm(), "noise")
    one = sound.clone()
    one[5, 7] += 3 * float(expected.bound[5, 7])
    with pytest.raises(AssertionError, match=r"result: .*\[5, 7\]"):
        expected.compare(one, "result")
    one[5, 7] = math.nan
    with pytest.raises(AssertionError, match=r"\[5, 7\]: nan"):
        expected.compare(one, "result")
    with pytest.raises(AssertionError, match="has shape"):
        expected.compare(sound[1:], "result")


def test_where_nothing_is_added_up_the_result_is_zero() -> None:
    config = FusedMoEConfig(4, 2, 64, 32, activation=MoEActivation.SWIGLUOAI)
    weights = make_weights(config, None, None, seed=0)
    inputs = make_inputs(config, 5, seed=0, routing="nothing")
    expected = expected_output(inputs.x, weights, config, topk_weights=inputs.topk_weights, topk_ids=inputs.topk_ids)
    assert not expected.bound.any()
    assert expected.limit == 0
    expected.compare(torch.zeros(5, 64, dtype=torch.bfloat16), "zeros")
    wrong = torch.zeros(5, 64, dtype=torch.bfloat16)
    wrong[3, 1] = 1e-30
    with pytest.raises(AssertionError, match="bounds"):
        expected.compare(wrong, "almost zeros")


def test_no_tokens() -> None:
    expected, *_ = expected_for(FusedMoEConfig(4, 2, 64, 32), (None, None), 0, 0)
    assert isinstance(expected, Expected)
    expected.compare(torch.empty(0, 64, dtype=torch.bfloat16), "nothing")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounding_errors_are_those_of_the_dtype(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20000, generator=generator, dtype=torch.float64) * 2.0 ** torch.randint(
        -20, 8, (20000,), generator=generator
    )
    if dtype is not torch.float32:
        x = x.float().double()  # torch converts by way of float32, which would round twice
    x = torch.cat((x, torch.zeros(1, dtype=torch.float64), torch.tensor([1.0, 2.0, -4.0], dtype=torch.float64)))
    rounding = Rounding(dtype)
    error = x.to(dtype).double() - x
    assert (error.abs() <= rounding.largest(x)).all()
    # uniform within what is possible
    normal = x.abs() > torch.finfo(dtype).smallest_normal
    ratio = float((error[normal].square() / rounding.variance(x[normal])).mean())
    assert 0.95 < ratio < 1.05
    assert torch.equal(rounding.square(x), error.square())
    assert torch.equal(Rounding(dtype, truncates=True).largest(x[normal]), 2 * rounding.largest(x[normal]))


def _limited(size: int) -> FusedMoEConfig:
    """A layer whose activated values are all at their limits, 0.75 * 0.75, where the bias of w13 is large."""
    return FusedMoEConfig(
        num_experts=2,
        top_k=1,
        hidden_size=size,
        intermediate_size=size,
        has_bias=True,
        activation=MoEActivation.SWIGLUSTEP,
        activation_params=ActivationParams(limit=0.75),
    )


def test_products_rounded_before_their_bias_need_a_claim() -> None:
    """Where product and bias cancel, what is left is mostly the rounding error of the product."""
    config = _limited(64)
    weights = make_weights(config, None, None, seed=0)
    # at the limits, whatever was rounded before
    weights = replace(weights, w13_bias=torch.full((2, 128), 8.0))
    inputs = make_inputs(config, 1, seed=1)
    arguments = {"topk_weights": torch.ones(1, 1), "topk_ids": torch.zeros(1, 1, dtype=torch.int64)}
    product = 0.5625 * weights.w2[0].double().sum(dim=1)
    bias = (-product * (1 + 2.0**-10)).float()
    weights = replace(weights, w2_bias=bias.expand(2, 64).contiguous())
    early = (product.bfloat16().double() + bias.double()).bfloat16()[None]
    expected_output(inputs.x, weights, config, rounds_products=True, **arguments).compare(early, "result")
    with pytest.raises(AssertionError, match="bounds"):
        expected_output(inputs.x, weights, config, **arguments).compare(early, "result")


def test_scales_rounded_before_they_multiply_need_a_claim() -> None:
    """Where all terms of a group have one sign, they lose together what their scale loses."""
    config = _limited(256)
    key = replace(kInt8Static, scale=replace(kInt8Static.scale, dtype=torch.float32))
    weights = make_weights(config, key, None, seed=0)
    # at the limits, and every code beyond the middle
    weights = replace(weights, w13_bias=torch.full((2, 512), 16.0), w2=weights.w2 | 128)
    assert weights.w2_scale is not None
    weights = replace(weights, w2_scale=torch.full_like(weights.w2_scale, 1.25 + 0.9 * 2.0**-8))
    inputs = make_inputs(config, 2, seed=1)
    arguments = {"topk_weights": torch.ones(2, 1), "topk_ids": torch.zeros(2, 1, dtype=torch.int64)}
    scales = {name: getattr(weights, name).bfloat16().float() for name in ("w13_scale", "w2_scale")}
    early = fused_moe_reference(inputs.x, replace(weights, **scales), config, compute_dtype=torch.bfloat16, **arguments)
    expected_output(inputs.x, weights, config, rounds_scales=True, **arguments).compare(early, "result")
    with pytest.raises(AssertionError, match="norm"):
        expected_output(inputs.x, weights, config, **arguments).compare(early, "result")


def test_scales_that_are_rounded_keep_their_size() -> None:
    """In float16 scales of 2^-20 have four bits left, which kernels avoid: the bound is that of their own bits."""
    config = replace(_limited(256), dtype=torch.float16)
    key = replace(kInt8Static, scale=replace(kInt8Static.scale, dtype=torch.float32))
    weights = make_weights(config, key, None, seed=0)
    assert weights.w2_scale is not None
    small = torch.full_like(weights.w2_scale, 1.3 * 2.0**-20)
    weights = replace(weights, w2_scale=small, w2_bias=torch.zeros(2, 256))
    inputs = make_inputs(config, 2, seed=1)
    arguments = {"topk_weights": torch.ones(2, 1), "topk_ids": torch.zeros(2, 1, dtype=torch.int64)}
    plain = expected_output(inputs.x, weights, config, **arguments)
    with_claim = expected_output(inputs.x, weights, config, rounds_scales=True, **arguments)
    # a second rounding of half a unit for each weight
    assert plain.typical < with_claim.typical < 2 * plain.typical


def _one_expert(w2: torch.Tensor, x: torch.Tensor, activation: MoEActivation) -> Expected:
    """A float32 layer of one expert without gate: the activated ``x``, times ``w2``."""
    config = FusedMoEConfig(
        num_experts=1,
        top_k=1,
        hidden_size=len(w2),
        intermediate_size=w2.shape[1],
        activation=activation,
        dtype=torch.float32,
    )
    weights = quantize_moe_weights(
        torch.eye(w2.shape[1], len(w2))[None], w2[None], gated=False, weight_key=None, activation_key=None
    )
    ids = torch.zeros(len(x), 1, dtype=torch.int32)
    return expected_output(x, weights, config, topk_weights=torch.ones(len(x), 1), topk_ids=ids)


def test_terms_of_one_sign_are_added_up_one_after_another() -> None:
    """The sum grows to many times the terms' norm, and each addition rounds it."""
    generator = torch.Generator().manual_seed(3)
    terms = 2048
    w2 = torch.rand(terms, terms, generator=generator) * 0.01 + 0.01
    x = torch.rand(1, terms, generator=generator) * 0.1 + 1
    expected = _one_expert(w2, x, MoEActivation.RELU2_NO_MUL)
    total = torch.zeros(terms)
    for column in range(terms):
        total = total + x[0, column].square() * w2[:, column]
    expected.compare(total[None], "one after another")
    # such an error is no rare draw: of zero mean and as large, the terms would leave much less
    norm = (x.square().double() * w2.double()).norm(dim=1)
    assert bool(((total.double() - expected.exact[0]).abs() > 6 * 2.0**-24 * math.sqrt(terms / 3) * norm).any())


def test_what_is_smaller_than_any_normal_number_may_be_zero() -> None:
    smallest = torch.finfo(torch.float32).smallest_normal
    x = torch.zeros(2, 8)
    x[0, 0], x[1, 0] = smallest, 1.0
    expected = _one_expert(torch.eye(8), x, MoEActivation.SILU_NO_MUL)
    assert 0 < expected.exact[0, 0] < smallest
    nothing = expected.exact.clone()
    nothing[0] = 0
    expected.compare(nothing, "flushed")
    nothing[1] = 0
    with pytest.raises(AssertionError, match="bounds"):
        expected.compare(nothing, "lost")


def test_what_ranks_add_up_may_err_as_their_parts_and_the_additions_do() -> None:
    config = FusedMoEConfig(num_experts=4, top_k=2, hidden_size=64, intermediate_size=64)
    parts = [plain_expected(config, (kInt8StaticChannelSym, kInt8DynamicTokenSym), seed)[0] for seed in (0, 1)]
    found = Expected.sum_of(parts, config.dtype)
    assert Expected.sum_of(parts[:1], config.dtype) is parts[0]
    assert torch.equal(found.exact, parts[0].exact + parts[1].exact)
    added = 2**-8 * (parts[0].exact.abs() + parts[1].exact.abs())  # bfloat16 has 8 bits
    assert torch.allclose(found.bound, parts[0].bound + parts[1].bound + added)
    assert max(part.limit for part in parts) < found.limit < sum(part.limit for part in parts) + float(added.norm())
    rounded = sum(part.exact.bfloat16() for part in parts)
    assert isinstance(rounded, torch.Tensor)
    found.compare(rounded, "bfloat16")
