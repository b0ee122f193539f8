"""The reference layer against loops over tokens and slots."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_core import (
    ActivationParams,
    DeviceInfo,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEKernel,
    MoEActivation,
    MoEWeights,
    QuantKey,
    TensorError,
    fused_moe_reference,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kInt4Static32,
    kInt4StaticAsym,
    kInt8DynamicTokenAsym,
    kInt8StaticChannelSym,
    kMxfp4Static,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from moe_core.parallel.prepare_finalize.batched import BatchedPrepareAndFinalize
from moe_core.reference.quantization import dequantize_weight, fake_quantize, quantize_moe_weights
from moe_core.reference.torch_experts import TorchExperts
from moe_core_toys import PLAIN
from torch import Tensor

PRE_SCALED = replace(kInt4Static32, pre_scaled=True)
KEYS: list[tuple[QuantKey | None, QuantKey | None]] = [
    (None, None),
    (kFp8Static128BlockSym, kFp8Dynamic128Sym),
    (kFp8Static128BlockSym, None),
    (kFp8StaticChannelSym, kFp8DynamicTokenSym),
    (kFp8StaticTensorSym, kFp8DynamicTensorSym),
    (kFp8StaticTensorSym, kFp8StaticTensorSym),
    (kMxfp8Static, kMxfp8Dynamic),
    (kMxfp4Static, None),
    (kInt8StaticChannelSym, kInt8DynamicTokenAsym),
    (kInt4Static32, None),
    (replace(kInt4StaticAsym.with_group(1, 32), permuted=True), None),
    (PRE_SCALED, None),
    (PRE_SCALED, kFp8DynamicTokenSym),
    (PRE_SCALED, kFp8DynamicTensorSym),
    (PRE_SCALED, kFp8StaticTensorSym),
]


def layer(config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None) -> MoEWeights:
    generator = torch.Generator().manual_seed(1)
    experts, rows = config.local_experts, config.w13_rows
    extras: dict[str, Any] = {}
    for name, cols in (("w13", config.hidden_size), ("w2", config.intermediate_size)):
        if weight_key is not None and weight_key.permuted:
            # some groups have no column here: those of another rank
            extras[f"{name}_g_idx"] = torch.randint(0, 7, (experts, cols), generator=generator, dtype=torch.int32)
            extras[f"{name}_groups"] = 9
        if weight_key is not None and weight_key.pre_scaled:
            extras[f"{name}_pre_scale"] = torch.randn(experts, cols, generator=generator)
    weights = quantize_moe_weights(
        torch.randn(experts, rows, config.hidden_size, generator=generator) * config.hidden_size**-0.5,
        torch.randn(experts, config.hidden_size, config.intermediate_size, generator=generator),
        gated=config.is_gated,
        weight_key=weight_key,
        activation_key=activation_key,
        w13_bias=torch.randn(experts, rows, generator=generator) if config.has_bias else None,
        w2_bias=torch.randn(experts, config.hidden_size, generator=generator) if config.has_bias else None,
        **extras,
    )
    if activation_key is not None and activation_key.is_static:
        scales = torch.tensor([0.005, 0.006, 0.007, 0.008, 0.009])[:experts]
        weights = replace(weights, w13_input_scale=scales, w2_input_scale=scales.flip(0))
    return weights


def matrix(weights: MoEWeights, name: str, parts: int, cols: int) -> Tensor:
    stored = getattr(weights, name)
    if weights.weight_key is None:
        return stored.double()
    return dequantize_weight(
        stored,
        getattr(weights, f"{name}_scale"),
        weights.weight_key,
        parts=parts,
        zero_point=getattr(weights, f"{name}_zero_point"),
        g_idx=getattr(weights, f"{name}_g_idx"),
        cols=cols,
        dtype=torch.float64,
    )


def by_loops(
    x: Tensor, weights: MoEWeights, config: FusedMoEConfig, topk_weights: Tensor, topk_ids: Tensor, local: list[int]
) -> Tensor:
    """SILU, gated; dynamic activation scales of a row only, or none, or static ones."""
    key = weights.activation_key
    w13 = matrix(weights, "w13", 2, config.hidden_size)
    w2 = matrix(weights, "w2", 1, config.intermediate_size)
    n = config.intermediate_size
    output = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for slot in range(config.top_k):
            chosen = int(topk_ids[token, slot])
            if not 0 <= chosen < config.num_experts or local[chosen] < 0:
                continue
            e, router = local[chosen], float(topk_weights[token, slot])
            a = x[token : token + 1].double() * (router if config.apply_router_weight_on_input else 1.0)
            if weights.w13_pre_scale is not None:
                a = a * weights.w13_pre_scale[e]
            if key is not None:
                a = fake_quantize(a, key, scale=None if weights.w13_input_scale is None else weights.w13_input_scale[e])
            z = a @ w13[e].T
            if weights.w13_bias is not None:
                z = z + weights.w13_bias[e]
            h = torch.tensor([[g / (1 + math.exp(-g)) for g in z[0, :n].tolist()]], dtype=torch.float64) * z[:, n:]
            if weights.w2_pre_scale is not None:
                h = h * weights.w2_pre_scale[e]
            if key is not None:
                h = fake_quantize(h, key, scale=None if weights.w2_input_scale is None else weights.w2_input_scale[e])
            y = h @ w2[e].T
            if weights.w2_bias is not None:
                y = y + weights.w2_bias[e]
            output[token] += y[0] * (1.0 if config.apply_router_weight_on_input else router)
    return output


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("weight_key", "activation_key"), KEYS, ids=str)
def test_is_that_of_the_loops(weight_key: QuantKey | None, activation_key: QuantKey | None, bias: bool) -> None:
    config = FusedMoEConfig(5, 2, 96, 136, num_local_experts=5, has_bias=bias)
    weights = layer(config, weight_key, activation_key)
    x = torch.randn(9, 96).bfloat16()
    topk_ids = torch.randint(-1, 7, (9, 2))
    topk_weights = torch.rand(9, 2)
    if activation_key is kFp8DynamicTensorSym:
        # one scale for all rows: the loops see one row
        x, topk_ids, topk_weights = x[:1], torch.tensor([[2, 7]]), topk_weights[:1]
    result = fused_moe_reference(x, weights, config, topk_weights=topk_weights, topk_ids=topk_ids)
    assert result.dtype is torch.float64
    expected = by_loops(x, weights, config, topk_weights, topk_ids, list(range(5)))
    # float64 sums in another order; a value on a rounding boundary of the quantizer would show, and none is
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    idle = ((topk_ids < 0) | (topk_ids >= 5)).all(dim=1)
    assert not result[idle].any()


def test_expert_map_picks_local_experts() -> None:
    config = FusedMoEConfig(6, 3, 64, 32, num_local_experts=2)
    weights = layer(config, None, None)
    local = [-1, 1, -1, -1, 0, -1]
    x, topk_weights = torch.randn(11, 64).bfloat16(), torch.rand(11, 3)
    topk_ids = torch.randint(-2, 8, (11, 3), dtype=torch.int32)
    result = fused_moe_reference(
        x,
        weights,
        config,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        expert_map=torch.tensor(local, dtype=torch.int32),
    )
    torch.testing.assert_close(
        result, by_loops(x, weights, config, topk_weights, topk_ids, local), rtol=1e-12, atol=1e-12
    )


def test_mapped_numbers_that_are_no_local_experts_contribute_nothing() -> None:
    config = FusedMoEConfig(6, 2, 64, 32, num_local_experts=2)
    weights = layer(config, None, None)
    x, topk_weights = torch.randn(6, 64).bfloat16(), torch.rand(6, 2)
    topk_ids = torch.tensor([[0, 1], [2, 3], [4, 5], [1, 3], [0, 2**32 + 1], [1 - 2**33, -1]])

    def run(*local: int) -> Tensor:
        expert_map = torch.tensor(local, dtype=torch.int32)
        return fused_moe_reference(
            x, weights, config, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map
        )

    result = run(2, 1, -7, 0, 92, 2**31 - 1)
    assert torch.equal(result, run(-1, 1, -1, 0, -1, -1))
    assert not result[[2, 4, 5]].any()
    assert result[[0, 1, 3]].any(dim=1).all()


@pytest.mark.parametrize(("weight_key", "activation_key"), KEYS[:4], ids=str)
def test_router_weight_on_the_input(weight_key: QuantKey | None, activation_key: QuantKey | None) -> None:
    config = FusedMoEConfig(4, 1, 64, 32, apply_router_weight_on_input=True, has_bias=True)
    weights = layer(config, weight_key, activation_key)
    x, topk_weights, topk_ids = torch.randn(7, 64).bfloat16(), torch.rand(7, 1), torch.randint(-1, 4, (7, 1))
    result = fused_moe_reference(x, weights, config, topk_weights=topk_weights, topk_ids=topk_ids)
    expected = by_loops(x, weights, config, topk_weights, topk_ids, list(range(4)))
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_a_scale_per_tensor_spans_all_tokens() -> None:
    config = FusedMoEConfig(4, 2, 64, 32)
    weights = layer(config, kFp8StaticTensorSym, kFp8DynamicTensorSym)
    x, topk_weights, topk_ids = torch.randn(6, 64).bfloat16(), torch.rand(6, 2), torch.randint(0, 4, (6, 2))
    x[0] *= 1000

    def run(tokens: slice) -> Tensor:
        return fused_moe_reference(
            x[tokens], weights, config, topk_weights=topk_weights[tokens], topk_ids=topk_ids[tokens]
        )

    whole = run(slice(None))
    # the first row's values set the scale of all, so that the others lose bits
    assert not torch.allclose(whole[1:], run(slice(1, None)), rtol=1e-3)


def test_a_limit_of_infinity_is_none() -> None:
    config = FusedMoEConfig(2, 1, 64, 32, activation=MoEActivation.SWIGLUOAI)
    weights = layer(config, None, None)
    x, topk_weights, topk_ids = torch.randn(5, 64).bfloat16() * 20, torch.ones(5, 1), torch.zeros(5, 1).int()

    def run(params: ActivationParams | None) -> Tensor:
        changed = replace(config, activation_params=params)
        return fused_moe_reference(x, weights, changed, topk_weights=topk_weights, topk_ids=topk_ids)

    assert torch.equal(run(None), run(ActivationParams(limit=7.0)))
    assert float(run(ActivationParams(limit=math.inf)).abs().max()) > 2 * float(run(None).abs().max())


@pytest.mark.parametrize(("weight_key", "activation_key"), KEYS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_yardstick_is_as_far_away_as_its_dtype_says(
    weight_key: QuantKey | None, activation_key: QuantKey | None, dtype: torch.dtype
) -> None:
    config = FusedMoEConfig(5, 2, 96, 136, num_local_experts=5, dtype=dtype)
    weights = layer(config, weight_key, activation_key)
    torch.manual_seed(0)
    x, topk_weights, topk_ids = torch.randn(33, 96).to(dtype), torch.rand(33, 2), torch.randint(0, 5, (33, 2))

    def run(**how: object) -> Tensor:
        return fused_moe_reference(x, weights, config, topk_weights=topk_weights, topk_ids=topk_ids, **how)  # type: ignore[arg-type]

    exact, yardstick = run(), run(compute_dtype=dtype)
    assert yardstick.dtype is torch.float64
    assert torch.equal(yardstick, yardstick.to(dtype).double())
    error = float((yardstick - exact).norm() / exact.norm())
    unit = torch.finfo(dtype).eps / 2
    assert error > 0
    # seven roundings of relative size up to a unit, and a float32 sum of 136 terms
    moved = 7 * unit + 2.0**-24 * math.sqrt(136)
    if activation_key is None:
        assert error < moved
    else:
        # a quantizer's steps are up to q = 2^-3 of a value: the share moved / q of x and of h crosses a boundary, by q
        assert error < moved + math.sqrt(2 * 2**-3 * moved)
    single = run(dtype=torch.float32)
    assert single.dtype is torch.float32
    assert float((single - run(quantize_activations=activation_key is not None)).norm() / exact.norm()) < 1e-2
    assert torch.equal(run(quantize_activations=False), exact) == (activation_key is None)


def test_no_tokens_and_no_experts() -> None:
    config = FusedMoEConfig(4, 2, 64, 32)
    weights = layer(config, kFp8Static128BlockSym, kFp8Dynamic128Sym)
    empty = fused_moe_reference(
        torch.empty(0, 64), weights, config, topk_weights=torch.empty(0, 2), topk_ids=torch.empty(0, 2).int()
    )
    assert empty.shape == (0, 64)
    nothing = fused_moe_reference(
        torch.randn(3, 64), weights, config, topk_weights=torch.ones(3, 2), topk_ids=torch.full((3, 2), -1)
    )
    assert nothing.shape == (3, 64)
    assert not nothing.any()


def test_what_does_not_fit_is_named() -> None:
    config = FusedMoEConfig(4, 2, 64, 32)
    weights = layer(config, None, None)
    x, topk_weights, topk_ids = torch.randn(3, 64), torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32)

    def run(**changed: object) -> Tensor:
        arguments = {"x": x, "topk_weights": topk_weights, "topk_ids": topk_ids, "config": config, **changed}
        return fused_moe_reference(arguments.pop("x"), weights, arguments.pop("config"), **arguments)  # type: ignore[arg-type]

    with pytest.raises(TensorError, match=r"\bx .*\[3, 63\]"):
        run(x=x[:, 1:])
    with pytest.raises(TensorError, match=r"topk_ids .*torch\.float32"):
        run(topk_ids=topk_weights)
    with pytest.raises(TensorError, match=r"expert_map \[8\]"):
        run(config=replace(config, num_experts=8))
    with pytest.raises(TensorError, match="float64|dtype"):
        run(dtype=torch.bfloat16)


@pytest.mark.parametrize("batched", [False, True])
def test_a_dynamic_scale_per_tensor_spans_what_this_rank_computes(batched: bool) -> None:
    config = FusedMoEConfig(num_experts=4, num_local_experts=2, top_k=2, hidden_size=32, intermediate_size=16)
    weights = layer(config, kFp8StaticTensorSym, kFp8DynamicTensorSym)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(4)).double()
    router = torch.full((5, 2), 0.5)
    ids = torch.tensor([[0, 1], [1, 3], [2, 3], [0, 2], [-1, 9]])
    expert_map = torch.tensor([0, 1, -1, -1], dtype=torch.int32)

    def run(x: Tensor) -> Tensor:
        named = {"topk_weights": router, "topk_ids": ids, "expert_map": expert_map}
        if not batched:
            return fused_moe_reference(x, weights, config, **named)
        given = replace(config, dtype=torch.float32, activation_format=FusedMoEActivationFormat.BATCHED)
        experts = type("Made", (TorchExperts,), {"claims": PLAIN})(
            given, weight_key=weights.weight_key, activation_key=weights.activation_key, device=DeviceInfo.parse("cpu")
        )
        kernel = FusedMoEKernel(experts, experts.convert(weights), BatchedPrepareAndFinalize(given))
        return kernel.apply(x.float(), **named)

    quiet = run(x)
    elsewhere = x.clone()
    elsewhere[[2, 4]] *= 1000.0  # tokens whose experts all live elsewhere, or nowhere
    assert torch.equal(run(elsewhere), quiet)
    here = x.clone()
    here[3] *= 1000.0
    assert not torch.equal(run(here)[:2], quiet[:2])
