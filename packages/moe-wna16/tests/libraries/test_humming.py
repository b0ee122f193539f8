"""Calls and scales against the Humming that is installed; no GPU needed.

Weights are compared with what the library writes where there is a GPU (tests/experts/test_humming.py): its function
for that is a kernel.
"""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace

import pytest
import torch
from moe_core import Environment, FusedMoEConfig, kInt4Static
from moe_core.spec.device import DeviceInfo
from moe_core.testing.data import make_weights
from moe_wna16.experts.humming import HummingWNA16Experts
from moe_wna16.keys import BASES
from moe_wna16.libraries import HUMMING
from moe_wna16.libraries.humming_layout import ordered_scales

if Environment.current().reason_against(HUMMING) is not None:
    pytest.skip("Humming is not installed (the nox session `libraries` installs it)", allow_module_level=True)

# the library warns of a machine without a GPU
pytestmark = pytest.mark.filterwarnings("ignore")

KEYS = [base.with_group(1, columns) for base in BASES for columns in (32, 64, 128, -1)]
LAYER = FusedMoEConfig(num_experts=4, top_k=2, hidden_size=256, intermediate_size=128)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """The library asks its device for little here; there is none."""
    import humming.device

    device = SimpleNamespace(is_ppu=False, sm_version=90, sm_major=9, index=0)
    monkeypatch.setattr(humming.device.DeviceInfo, "_get_value", lambda self: device)


def made(key, capability="sm90"):
    return HummingWNA16Experts(LAYER, weight_key=key, activation_key=None, device=DeviceInfo.parse(capability))


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_library_understands_the_layer(key):
    config = made(key).library().LayerConfig(**made(key).layer_arguments(256, 512))
    assert (config.shape_n, config.shape_k, config.num_experts, config.sm_version) == (256, 512, 4, 90)
    assert config.b_dtype.num_bits == key.dtype.bits
    assert not config.b_dtype.is_signed
    assert config.has_zero_point == config.is_fp_zero_point == (not key.symmetric)
    assert config.is_group_weight_scale == (key.group_size != -1)
    assert config.is_channel_weight_scale == (key.group_size == -1)
    assert not config.has_input_scale


@pytest.mark.parametrize("capability", ["sm80", "sm89", "sm90", "sm100", "sm120"])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_layout_is_the_same_on_every_gpu(key, capability):
    config = made(key).library().LayerConfig(**made(key, capability).layer_arguments(256, 512))
    assert not config.use_packed_k_layout
    assert not config.use_raw_weight
    assert not config.use_flat_weight
    assert not config.use_block_scaled_mma
    assert config.should_apply_bs_on_c == (key.group_size == -1)


def test_calls_fit_the_library():
    experts = made(kInt4Static)
    weights = experts.convert(make_weights(LAYER, kInt4Static, None, seed=0))
    a, out = torch.zeros(3, 256, dtype=torch.bfloat16), torch.zeros(3, 256, dtype=torch.bfloat16)
    offsets = torch.zeros(5, dtype=torch.int32)
    calls = []
    real = experts.library()

    def bound(name):
        signature = inspect.signature(getattr(real, name))
        return lambda *arguments, **named: calls.append((name, signature.bind(*arguments, **named).arguments)) or {}

    experts.library = lambda: SimpleNamespace(
        LayerConfig=real.LayerConfig,
        get_heuristics_config=bound("get_heuristics_config"),
        humming_forward=bound("humming_forward"),
    )
    experts.product("w13", a, weights, out, offsets)
    (first, asked), (second, given) = calls
    assert (first, second) == ("get_heuristics_config", "humming_forward")
    assert (asked["shape_m"], asked["gemm_type"]) == (3, "grouped_contiguous")
    assert given["inputs"] is a
    assert given["outputs"] is out
    assert given["expert_layout"] is offsets
    assert not json.loads(given["tuning_config"])["use_stream_k"]


@pytest.mark.parametrize(("groups", "whole_rows"), [(5, False), (1, False), (1, True)])
def test_scales_are_ordered_as_the_library_orders_them(groups, whole_rows):
    from humming.transform import transform_humming_weight_scale

    scale = torch.randn(3, 192, groups, dtype=torch.bfloat16)
    theirs = transform_humming_weight_scale(scale, to_apply_on_c=whole_rows)
    assert torch.equal(ordered_scales(scale, whole_rows=whole_rows), theirs)
