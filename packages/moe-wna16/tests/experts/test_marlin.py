"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import (
    FusedMoEActivationFormat,
    FusedMoEConfig,
    TensorError,
    kFp8DynamicTokenSym,
    kInt4Static,
    kInt4Static32Asym,
    kInt8Static,
)
from moe_core.kernels.gemm.workspaces import BEFORE_GEMM2
from moe_core.kernels.launch.launch import record
from moe_core.spec.device import DeviceInfo
from moe_core.testing import ConformanceTests
from moe_core.testing.data import make_weights
from moe_core.testing.meta_layers import call_on_meta, experts_examples
from moe_wna16.experts.marlin import BatchedMarlinWNA16Experts, MarlinW4AFp8Experts, MarlinWNA16Experts

STANDARD, BATCHED = FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED


class TestMarlinWNA16(ConformanceTests):
    experts = MarlinWNA16Experts
    interpreted_every = 5


class TestBatchedMarlinWNA16(ConformanceTests):
    experts = BatchedMarlinWNA16Experts
    interpreted_every = 8


class TestMarlinW4AFp8(ConformanceTests):
    experts = MarlinW4AFp8Experts
    interpreted_every = 5


def test_single_columns_are_compiled():
    """Of rows with an activation order, of which a rank has a part; with factors of inputs and without."""
    found = experts_examples(MarlinWNA16Experts, DeviceInfo.parse("sm90"))
    factors = set()
    for example in (one for one in found if one.name.endswith("shard")):
        with record() as launches:
            example.launch()
        gemms = [one.arguments["a_args"] for one in launches if one.name == "grouped_gemm_kernel"]
        indices = [index.dtype for _, _, _, index, _, _, _ in gemms]
        assert indices == [torch.int32] * 2
        factors |= {None if pre_scales is None else pre_scales.dtype for *_, pre_scales, _ in gemms}
    assert factors == {None, torch.float32}


def test_reloading_another_activation_order():
    """Groups of any sizes take the same memory; whole ones take less, which is told by what it comes from."""
    key = replace(kInt4Static.with_group(1, 64), permuted=True)
    config = FusedMoEConfig(num_experts=2, top_k=1, hidden_size=128, intermediate_size=256)
    experts = MarlinWNA16Experts(config, weight_key=key, activation_key=None, device=DeviceInfo.parse("sm90"))
    ragged, other = (make_weights(config, key, None, seed=seed) for seed in (0, 1))
    shuffled = torch.stack([torch.randperm(256, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3)])
    scale = ragged.w2_scale[:, :, :4].contiguous()
    whole = replace(ragged, w2_g_idx=(shuffled // 64).to(torch.int32), w2_scale=scale)
    layer, another, least = (experts.convert(weights) for weights in (ragged, other, whole))
    layer.copy_(another)
    assert all(torch.equal(tensor, dict(another.tensors())[name]) for name, tensor in layer.tensors())
    before = {name: tensor.clone() for name, tensor in layer.tensors()}
    filled = "groups that are not all of 64 columns, filled up to 512 columns"
    with pytest.raises(TensorError) as caught:
        layer.copy_(least)
    found = "w2 of the new weights has columns in an activation order (g_idx) of whole groups of 64, "
    assert str(caught.value).startswith(f"{found}expected columns in an activation order (g_idx) of {filled}:")
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.tensors())
    with pytest.raises(TensorError, match=r"\bw2 .*g_idx"):
        least.copy_(layer)
    plain = replace(key, permuted=False)
    ordered = MarlinWNA16Experts(config, weight_key=plain, activation_key=None, device=DeviceInfo.parse("sm90"))
    with pytest.raises(TensorError, match=r"\bw13 "):
        layer.copy_(ordered.convert(make_weights(config, plain, None, seed=0)))


@pytest.mark.parametrize(
    ("device", "key", "hidden", "tokens", "expected"),
    [
        ("sm90", kInt4Static, 1024, 400, ["words_kernel"] * 2),
        ("sm90", kInt4Static32Asym, 1024, 1500, ["words_kernel"] * 2),
        # rows of x that do not start at multiples of 32 bytes; those of h do
        ("sm90", kInt4Static, 1020, 400, ["grouped_gemm_kernel", "words_kernel"]),
        ("sm90", kInt4Static, 1024, 96, ["words_kernel"] * 2),
        ("sm90", kInt4Static, 1024, 40, ["grouped_gemm_kernel"] * 2),
        ("sm90", kInt8Static, 1024, 400, ["grouped_gemm_kernel"] * 2),
        ("sm100", kInt4Static, 1024, 400, ["grouped_gemm_kernel"] * 2),
        ("sm90", replace(kInt4Static, permuted=True), 1024, 400, ["grouped_gemm_kernel"] * 2),
    ],
)
def test_many_rows_on_hopper(device, key, hidden, tokens, expected):
    """With 15 rows per expert and more 4-bit words are dequantized beside the tensor cores."""
    config = FusedMoEConfig(8, 2, hidden, 512, dtype=torch.bfloat16)
    experts = MarlinWNA16Experts(config, weight_key=key, activation_key=None, device=DeviceInfo.parse(device))
    with record() as launches:
        call_on_meta(experts, tokens)
    gemms = [one for one in launches if one.name in ("grouped_gemm_kernel", "words_kernel")]
    assert [one.name for one in gemms] == expected
    for one in gemms:
        if one.name == "words_kernel":
            # a tile of the schedule is one of the kernel's
            assert one.arguments["form"].heights.value[0] == (64 if tokens <= 192 else 128)


@pytest.mark.parametrize(
    ("hidden", "pre_scaled", "layout", "expected"),
    [
        (1024, False, STANDARD, ["words_kernel"] * 2),
        (1020, False, STANDARD, ["grouped_gemm_kernel", "words_kernel"]),
        # gathered by pair; batched rows have one order
        (1024, True, STANDARD, ["grouped_gemm_kernel"] * 2),
        (1024, True, BATCHED, ["words_kernel"] * 2),
    ],
)
def test_many_rows_of_e4m3_on_hopper(hidden, pre_scaled, layout, expected):
    """Quantized rows end in whole tiles of columns, but which columns there are the kernel must know in whole 16."""
    config = FusedMoEConfig(8, 2, hidden, 512, dtype=torch.bfloat16, activation_format=layout, max_num_tokens=400)
    key, target = replace(kInt4Static, pre_scaled=pre_scaled), DeviceInfo.parse("sm90")
    experts = MarlinW4AFp8Experts(config, weight_key=key, activation_key=kFp8DynamicTokenSym, device=target)
    with record() as launches:
        call_on_meta(experts, 400)
    assert [one.name for one in launches if one.name in ("grouped_gemm_kernel", "words_kernel")] == expected


def test_layers_with_adapters_have_tiles_for_the_kernel_that_adds_deltas():
    config = FusedMoEConfig(8, 2, 1024, 512, dtype=torch.bfloat16, is_lora_enabled=True)
    experts = MarlinWNA16Experts(config, weight_key=kInt4Static, activation_key=None, device=DeviceInfo.parse("sm90"))
    assert not any(experts.plan(tokens).gemm1.warp_specialized for tokens in (96, 400, 4096))


@pytest.mark.parametrize("pre_scaled", [False, True])
def test_memory_of_h_is_given_to_the_result_of_gemm2(pre_scaled):
    """h is quantized before gemm2, which reads the quantized rows alone; 16-bit h is what it reads."""
    config = FusedMoEConfig(8, 2, 1024, 512, dtype=torch.bfloat16)
    key, target = replace(kInt4Static, pre_scaled=pre_scaled), DeviceInfo.parse("sm90")
    quantized = MarlinW4AFp8Experts(config, weight_key=key, activation_key=kFp8DynamicTokenSym, device=target)
    plain = MarlinWNA16Experts(config, weight_key=key, activation_key=None, device=target)
    phases, others = ({spec.name: spec.phase for spec in one.workspaces(400)} for one in (quantized, plain))
    assert phases["h"] == phases["gathered"] == phases["x_values"] == BEFORE_GEMM2
    assert phases["h_values"] is others["h"] is others["gathered"] is None
