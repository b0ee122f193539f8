"""Calls and layouts against OpenAI's triton_kernels where it is installed; no GPU needed."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from moe_core import Environment, FusedMoEConfig, MoEActivation, kMxfp4Static
from moe_core.spec.device import DeviceInfo
from moe_core.testing.data import make_weights
from moe_mxfp4.experts.oai_triton import OAITritonExperts
from moe_mxfp4.libraries import TRITON_KERNELS
from moe_mxfp4.libraries.hopper_layout import swizzled_scales, swizzled_weights
from moe_mxfp4.libraries.oai_triton import load_triton_kernels

if Environment.current().reason_against(TRITON_KERNELS) is not None:
    pytest.skip("OpenAI's triton_kernels is not installed (it is on no package index)", allow_module_level=True)

LAYER = FusedMoEConfig(
    num_experts=4, top_k=2, hidden_size=128, intermediate_size=96, activation=MoEActivation.SWIGLUOAI, has_bias=True
)


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (48, 192), (5888, 2880)])
def test_weights_are_what_the_library_swizzles(rows, columns):
    calls = load_triton_kernels()
    w = torch.randint(0, 256, (2, rows, columns // 2), dtype=torch.uint8)
    theirs = calls.HopperMXValueLayout(list(w.mT.shape), mx_axis=1).swizzle_data(w.mT)
    assert torch.equal(theirs, swizzled_weights(w).mT)
    assert theirs.stride() == swizzled_weights(w).mT.stride()


@pytest.mark.parametrize("warps", [4, 8])
def test_scales_are_what_the_library_swizzles(warps):
    calls = load_triton_kernels()
    scale = torch.randint(0, 256, (2, 512, 92), dtype=torch.uint8)
    theirs = calls.HopperMXScaleLayout(list(scale.mT.shape), mx_axis=1, num_warps=warps).swizzle_data(scale.mT)
    assert torch.equal(theirs, swizzled_scales(scale, warps).mT)
    assert theirs.stride() == swizzled_scales(scale, warps).mT.stride()


@pytest.mark.parametrize("config", [LAYER, replace(LAYER, activation=MoEActivation.SILU, has_bias=False)])
def test_calls_fit_the_library(config):
    real = load_triton_kernels()
    recorded = []

    def matmul_ogs(*arguments, **keywords):
        bound = inspect.signature(real.matmul_ogs).bind(*arguments, **keywords).arguments
        recorded.append(bound)

    def compute_expt_data(*arguments):
        inspect.signature(real.compute_expt_data).bind(*arguments)
        return

    calls = SimpleNamespace(**vars(real) | {"matmul_ogs": matmul_ogs, "compute_expt_data": compute_expt_data})
    doubled = type("Recorded", (OAITritonExperts,), {"library": staticmethod(lambda: calls)})
    instance = doubled(config, weight_key=kMxfp4Static, activation_key=None, device=DeviceInfo.parse("sm90"))
    weights = instance.convert(make_weights(config, kMxfp4Static, None, seed=0))
    routing = instance.routing(torch.zeros(6, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
    gather = calls.GatherIndx(torch.zeros(6, dtype=torch.int32), torch.zeros(6, dtype=torch.int32))
    x, h = torch.empty(3, 128, dtype=torch.bfloat16), torch.empty(6, 128, dtype=torch.bfloat16)
    first = {"fused_activation": instance.activation} if instance.fuses else {}
    instance.product("w13", x, h, weights, gather_indx=gather, **first, **routing)
    instance.product("w2", h, torch.empty(6, 128, dtype=torch.bfloat16), weights, **routing)
    for bound, (rows, cols) in zip(recorded, ((256, 128), (128, 128)), strict=True):
        assert bound["w"].shape == [4, cols, rows]
        assert bound["w"].dtype is real.FP4
        assert bound["w"].storage.layout.name == "HOPPER_VALUE"
        assert bound["precision_config"].weight_scale.storage.layout.name == "HOPPER_SCALE"
        assert (bound["bias"] is not None) == config.has_bias
    assert instance.fuses == ("fused_activation" in recorded[0])
