"""Humming where it is installed; everywhere, the adapter around a double that computes what Humming does.

The double reads weights and scales from the places in which Humming's kernels look for them, written down here code
by code.  That the calls fit the installed library, and layouts its helpers, is tested in tests/libraries and below.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from moe_core import (
    TRITON,
    Environment,
    FusedMoEConfig,
    MoEActivation,
    kFp8DynamicTokenSym,
    kInt4Static,
    kInt4StaticAsym,
    kInt8StaticAsym,
)
from moe_core.errors import TensorError
from moe_core.spec.device import DeviceInfo
from moe_core.testing import ConformanceTests
from moe_core.testing.data import make_weights
from moe_wna16.experts.humming import HummingWNA16Experts
from moe_wna16.keys import BASES
from moe_wna16.libraries import HUMMING
from moe_wna16.libraries.humming_layout import ordered_scales, packed_bytes, packed_int4

MISSING = Environment.current().reason_against(HUMMING)
needs_humming = pytest.mark.skipif(MISSING is not None, reason="Humming is not installed")

HOPPER = DeviceInfo.parse("sm90")
LAYER = FusedMoEConfig(num_experts=4, top_k=2, hidden_size=256, intermediate_size=128)


@pytest.mark.gpu
@needs_humming
class TestHumming(ConformanceTests):
    experts = HummingWNA16Experts


# ------------------------------------------------------------------ layouts


@functools.cache
def places(bits):
    """(word, lowest bit) [64, 16] of each code in the 32 * bits words of a block."""
    word, shift = (torch.zeros(64, 16, dtype=torch.int64) for _ in range(2))
    for thread in range(32):
        for i in range(4):
            for j in range(2):
                for h in range(2):
                    for l in range(2):
                        at = 16 * i + 8 * j + thread // 4, 8 * h + 2 * (thread % 4) + l
                        if bits == 4:
                            number, position = i, 4 * l + 2 * j + h
                        else:
                            number, position = 2 * i + j, 2 * l + h
                        word[at], shift[at] = thread * bits + number, position * bits
    return word, shift


def stored_codes(words, bits):
    """[N, K] int64: the codes in one expert's words [K / 16, N * bits / 2]."""
    word, shift = places(bits)
    blocks = words.long().view(words.shape[0], -1, 32 * bits)
    codes = (blocks[:, :, word] >> shift) & (2**bits - 1)  # [K / 16, N / 64, 64, 16]
    return codes.permute(1, 2, 0, 3).reshape(-1, 16 * words.shape[0])


def stored_scales(scale, whole_rows):
    """[N, G] of one expert's scales [G, N]."""
    row = torch.arange(scale.shape[1])
    if whole_rows:
        place = row // 32 * 32 + row % 8 // 2 * 8 + row % 32 // 8 * 2 + row % 2
    else:
        place = row // 64 * 64 + row % 8 * 8 + row % 64 // 8
    return scale[:, place].t()


def test_every_code_has_its_place():
    word, shift = places(4)
    assert len(set(zip(word.flatten().tolist(), shift.flatten().tolist(), strict=True))) == 64 * 16
    word, shift = places(8)
    assert len(set(zip(word.flatten().tolist(), shift.flatten().tolist(), strict=True))) == 64 * 16


@pytest.mark.parametrize(("rows", "cols"), [(64, 32), (192, 96), (128, 256)])
def test_codes_are_packed_into_their_places(rows, cols):
    int4_codes = torch.randint(0, 16, (3, rows, cols), dtype=torch.uint8)
    packed = packed_int4(int4_codes[..., 0::2] | int4_codes[..., 1::2] << 4)
    assert packed.shape == (3, cols // 16, 2 * rows)
    codes = torch.randint(0, 256, (3, rows, cols), dtype=torch.uint8)
    plain, distances = packed_bytes(codes, distances=False), packed_bytes(codes, distances=True)
    assert plain.shape == distances.shape == (3, cols // 16, 4 * rows)
    for expert in range(3):
        assert torch.equal(stored_codes(packed[expert], 4), int4_codes[expert].long())
        assert torch.equal(stored_codes(plain[expert], 8), codes[expert].long())
        read = stored_codes(distances[expert], 8)
        assert torch.equal(torch.where(read < 128, read, 127 - read), codes[expert].long() - 128)


def test_scales_are_ordered_into_their_places():
    grouped, rows = torch.randn(3, 192, 5), torch.randn(3, 192, 1)
    for expert in range(3):
        assert torch.equal(stored_scales(ordered_scales(grouped, whole_rows=False)[expert], False), grouped[expert])
        assert torch.equal(stored_scales(ordered_scales(rows, whole_rows=True)[expert], True), rows[expert])


def test_sizes_that_are_no_whole_blocks_are_refused():
    for w in (torch.zeros(2, 96, 64), torch.zeros(2, 64, 40)):
        with pytest.raises(TensorError, match="64 rows"):
            packed_bytes(w.byte(), distances=False)
    with pytest.raises(TensorError, match="96 x 64"):
        packed_int4(torch.zeros(2, 96, 32, dtype=torch.uint8))
    with pytest.raises(TensorError, match="96 rows"):
        ordered_scales(torch.zeros(2, 96, 2), whole_rows=False)


@pytest.mark.gpu
@needs_humming
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key", [*BASES, *(base.with_group(1, -1) for base in BASES)])
def test_layouts_are_what_the_library_writes(key, dtype):
    from humming.config import LayerConfig
    from humming.transform import transform_humming_tensors

    key = key.with_scale_dtype(dtype)
    config = replace(LAYER, dtype=dtype, intermediate_size=384)
    experts = HummingWNA16Experts(
        config, weight_key=key, activation_key=None, device=DeviceInfo.current(torch.device("cuda"))
    )
    weights = make_weights(config, key, None, seed=0).to("cuda")
    ours = experts.convert(weights)
    for name, rows, cols in (("w13", 768, 256), ("w2", 256, 384)):
        layer = LayerConfig(**experts.layer_arguments(rows, cols))
        given = {
            "weight": getattr(weights, name).view(torch.int32),
            "weight_scale": getattr(weights, f"{name}_scale"),
        }
        zero_point = getattr(weights, f"{name}_zero_point")
        if zero_point is not None:
            given["zero_point"] = zero_point.to(dtype)
        theirs = transform_humming_tensors(layer, given)
        assert torch.equal(getattr(ours, name), theirs["weight"])
        scale = ours.quant_config.w1_scale if name == "w13" else ours.quant_config.w2_scale
        assert torch.equal(scale, theirs["weight_scale"])
        if zero_point is not None:
            ours_zero = ours.quant_config.w1_zp if name == "w13" else ours.quant_config.w2_zp
            assert torch.equal(ours_zero, theirs["zero_point"])


# ------------------------------------------------------------------- double


class Double:
    """What is called of the library."""

    LayerConfig = SimpleNamespace

    @staticmethod
    def get_heuristics_config(layer, *, shape_m, gemm_type):
        assert gemm_type == "grouped_contiguous"
        assert shape_m > 0
        return {"block_shape": (64, 128, 64), "rows": shape_m, "use_stream_k": True}

    @staticmethod
    def humming_forward(
        layer, *, inputs, weight, weight_scale, zero_point, outputs, expert_layout, compute_config, tuning_config
    ):
        assert json.loads(compute_config) == {"gemm_type": "grouped_contiguous"}
        tuning = json.loads(tuning_config)
        assert 0 < tuning["rows"] <= len(inputs)
        assert not tuning["use_stream_k"]
        bits = int(layer.b_dtype.removeprefix("uint"))
        dtype = getattr(torch, layer.a_dtype)
        rows, cols, group = layer.shape_n, layer.shape_k, layer.weight_scale_group_size or layer.shape_k
        assert layer.a_dtype == layer.c_dtype == layer.bs_dtype
        assert inputs.dtype is outputs.dtype is weight_scale.dtype is dtype
        assert inputs.shape == (len(outputs), cols)
        assert outputs.shape[1] == rows
        assert weight.shape == (layer.num_experts, cols // 16, rows * bits // 2)
        assert weight_scale.shape == (layer.num_experts, cols // group, rows)
        assert expert_layout.shape == (layer.num_experts + 1,)
        assert expert_layout.dtype is weight.dtype is torch.int32
        for tensor in (inputs, outputs, weight, weight_scale, expert_layout):
            assert tensor.is_contiguous()
            assert tensor is expert_layout or tensor.data_ptr() % 16 == 0
        assert layer.has_zero_point == (zero_point is not None)
        if zero_point is not None:
            assert layer.is_fp_zero_point
            assert zero_point.shape == (layer.num_experts, cols // group, rows)
            assert zero_point.dtype is dtype
            assert zero_point.is_contiguous()
        for expert in range(layer.num_experts):
            used = slice(int(expert_layout[expert]), int(expert_layout[expert + 1]))
            if used.start == used.stop:
                continue
            codes = stored_codes(weight[expert], bits)
            if layer.has_zero_point:
                values = codes - stored_scales(zero_point[expert], False).float().repeat_interleave(group, 1)
            elif bits == 8 and dtype is torch.bfloat16:
                values = torch.where(codes < 128, codes, 127 - codes)
            else:
                values = codes - 2 ** (bits - 1)
            scale = stored_scales(weight_scale[expert], layer.weight_scale_group_size == 0).float()
            if layer.weight_scale_group_size:
                w = (values * scale.repeat_interleave(group, 1)).to(dtype).float()
                outputs[used] = (inputs[used].float() @ w.t()).to(dtype)
            else:
                outputs[used] = ((inputs[used].float() @ values.float().t()) * scale[:, 0]).to(dtype)


#: core computes activations: one gated, one with parameters and one without a gate are enough here
FEW = frozenset({MoEActivation.SILU, MoEActivation.SWIGLUOAI, MoEActivation.RELU2_NO_MUL})


class DoubleExperts(HummingWNA16Experts):
    """The adapter with the double in the library's place."""

    claims = replace(HummingWNA16Experts.claims, requires=(TRITON,), activations=FEW)

    @staticmethod
    def library():
        return Double


class TestDouble(ConformanceTests):
    experts = DoubleExperts
    device = "cpu"


# ----------------------------------------------------------------- refusals


def reasons(key, config=LAYER, activation_key=None, device=HOPPER):
    installed = Environment({"humming-kernels": "0.1.19", "triton": "3.6.0"})
    return "; ".join(HummingWNA16Experts.unsupported_reasons(config, key, activation_key, device, installed))


def test_what_is_not_read_is_refused():
    for key in (kInt4Static, kInt4StaticAsym.with_group(1, 64), kInt8StaticAsym.with_group(1, -1)):
        assert reasons(key) == ""
    for key in (
        replace(kInt4Static, permuted=True),
        replace(kInt4Static, pre_scaled=True),
        kInt4Static.with_scale_dtype(torch.float32),
        kInt4Static.with_group(1, 256),
    ):
        assert "does not read weights quantized as" in reasons(key)
    assert "does not take activations" in reasons(kInt4Static, activation_key=kFp8DynamicTokenSym)
    other = reasons(kInt4Static.with_scale_dtype(torch.float16))
    assert other == "reads scales of the hidden states' dtype torch.bfloat16, got torch.float16"
    assert "does not add biases" in reasons(kInt4Static, replace(LAYER, has_bias=True))
    assert "multiple of 128, got 192" in reasons(kInt4Static, replace(LAYER, intermediate_size=192))
    assert "needs sm80 or newer" in reasons(kInt4Static, device=DeviceInfo.parse("sm75"))


def test_an_old_version_is_refused_with_what_to_install():
    old = Environment({"humming-kernels": "0.1.10", "triton": "3.6.0"})
    (reason,) = HummingWNA16Experts.unsupported_reasons(LAYER, kInt4Static, None, HOPPER, old)
    assert reason == "needs humming-kernels >= 0.1.19, found 0.1.10 (pip install 'moe-wna16[humming]')"


def test_a_share_of_the_experts_means_a_share_of_the_rows():
    config = replace(LAYER, num_experts=16, num_local_experts=4)
    experts = DoubleExperts(config, weight_key=kInt4Static, activation_key=None, device=HOPPER)
    weights = experts.convert(make_weights(config, kInt4Static, None, seed=0))
    asked = []

    def humming_forward(layer, *, tuning_config, **others):
        asked.append(json.loads(tuning_config)["rows"])

    experts.library = lambda: SimpleNamespace(
        LayerConfig=SimpleNamespace,
        get_heuristics_config=Double.get_heuristics_config,
        humming_forward=humming_forward,
    )
    for rows in (1, 8, 33, 33):
        a = torch.zeros(rows, 256, dtype=torch.bfloat16)
        experts.product("w13", a, weights, a, torch.zeros(5, dtype=torch.int32))
    assert asked == [1, 2, 9, 9]
