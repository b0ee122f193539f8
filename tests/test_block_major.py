"""8-bit weights in the order of the k loop's steps: on sm_90, and with the same bits as row-major ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import moe_core as mc
import pytest
import torch
from moe_core.kernels.launch.compile_target import Target
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.runtime.kernel import FusedMoEKernel
from moe_core.testing.data import make_inputs, make_weights
from moe_fp8.experts.triton import TritonFp8BlockExperts
from moe_fp8.experts.triton_scaled_mm import TritonFp8Experts
from moe_int8.experts.triton import TritonInt8Experts

KINDS = [
    (TritonFp8BlockExperts, mc.kFp8Static128BlockSym, mc.kFp8Dynamic128Sym),
    (TritonFp8Experts, mc.kFp8StaticChannelSym, mc.kFp8DynamicTokenSym),
    (TritonInt8Experts, mc.kInt8StaticChannelSym, mc.kInt8DynamicTokenSym),
    (TritonInt8Experts, mc.kInt8StaticChannelSym, mc.kInt8DynamicTokenAsym),
]
NAMES = ["fp8 blocks", "fp8 channel", "int8", "int8 zero points"]


def made(experts: Any, config: mc.FusedMoEConfig, keys: tuple[Any, ...], arch: str = "sm90") -> Any:
    return experts(config, weight_key=keys[0], activation_key=keys[1], device=Target.parse(arch).device)


@pytest.mark.parametrize(("experts", "weight_key", "activation_key"), KINDS, ids=NAMES)
@pytest.mark.diagonal(2)
@pytest.mark.parametrize("tokens", [1, 20, 90])
def test_both_layouts_give_the_same_bits(
    experts: Any, weight_key: mc.QuantKey, activation_key: mc.QuantKey, tokens: int
) -> None:
    # columns of w13 in three steps; of w2, with 200 columns, none is block-major
    for size in (256, 200):
        config = mc.FusedMoEConfig(4, 2, 384, size)
        weights = make_weights(config, weight_key, activation_key, seed=size)
        inputs = make_inputs(config, tokens, seed=tokens)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        results = []
        for shared in (False, True):
            given = replace(weights.to(device), shared=shared)
            layer = made(experts, config, (weight_key, activation_key))
            converted = layer.convert(given)
            assert converted.w13.shape == ((4, 2 * size, 384) if shared else (4, 3, 2 * size, 128))
            assert converted.w2.shape == ((4, 384, size) if shared or size == 200 else (4, 2, 384, 128))
            kernel = FusedMoEKernel(layer, converted, default_prepare_finalize(config))
            here = inputs.to(device)
            results.append(kernel.apply(here.x, topk_weights=here.topk_weights, topk_ids=here.topk_ids))
        assert results[0].isfinite().all()
        assert results[0].any()
        assert torch.equal(results[0], results[1])


def test_a_layer_that_owns_its_weights_takes_new_ones_that_are_shared() -> None:
    _, *keys = KINDS[1]
    config = mc.FusedMoEConfig(4, 2, 256, 128)
    first, second = (replace(make_weights(config, *keys, seed=seed), shared=True) for seed in (0, 1))
    kernel = made(TritonFp8Experts, config, tuple(keys))
    kernel = FusedMoEKernel(kernel, kernel.convert(replace(first, shared=False)), default_prepare_finalize(config))
    selection = mc.oracle("fp8").select(config, weight_key=keys[0], activation_key=keys[1], device="cpu")
    layer = mc.FusedMoELayer(kernel, selection, owns_weights=True)
    layer.reload(second)
    expected = second.w13.view(torch.uint8).view(4, 256, 2, 128).transpose(1, 2)
    assert torch.equal(layer.weights.w13.view(torch.uint8), expected)


@pytest.mark.parametrize("arch", ["sm80", "sm100", "sm120", "gfx942"])
def test_other_devices_read_weights_as_they_are(arch: str) -> None:
    config = mc.FusedMoEConfig(4, 2, 256, 128)
    weights = make_weights(config, mc.kInt8StaticChannelSym, mc.kInt8DynamicTokenSym, seed=0)
    layer = made(TritonInt8Experts, config, (mc.kInt8StaticChannelSym, mc.kInt8DynamicTokenSym), arch)
    converted = layer.convert(weights)
    assert converted.w13 is weights.w13
    assert converted.w2 is weights.w2


def test_blocks_of_64_columns_stay_as_they_are() -> None:
    key = mc.kFp8Static128BlockSym.with_group(128, 64)
    config = mc.FusedMoEConfig(4, 2, 256, 128)
    weights = make_weights(config, key, mc.kFp8Dynamic64Sym, seed=0)
    converted = made(TritonFp8BlockExperts, config, (key, mc.kFp8Dynamic64Sym)).convert(weights)
    assert converted.w13 is weights.w13
    assert converted.w2 is weights.w2
