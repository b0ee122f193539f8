"""Silent faults that fused MoE layers have had elsewhere, as tests of every INT8 backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import moe_int8
import pytest
import torch
from moe_core import (
    DeviceInfo,
    Environment,
    FusedMoEConfig,
    FusedMoELayer,
    MoEWeights,
    Oracle,
    QuantKey,
    fused_moe_reference,
    kInt4W4A8StaticChannelSym,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTensorSym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kInt8StaticTensorAsym,
    kInt8StaticTensorSym,
)
from moe_core.testing.data import make_inputs
from moe_int8.scheme import SCHEME
from moe_kit.known_faults import KnownFaultTests, Layers, Run
from torch import Tensor

QUANTISED = (
    *(
        (kInt8StaticChannelSym, activation)
        for activation in (
            kInt8DynamicTokenSym,
            kInt8DynamicTokenAsym,
            kInt8StaticTensorSym,
            kInt8StaticTensorAsym,
            kInt8DynamicTensorSym,
        )
    ),
    (kInt4W4A8StaticChannelSym, kInt8DynamicTokenSym),
    (kInt4W4A8StaticGroup128Sym, kInt8DynamicTokenSym),
    (kInt4W4A8StaticGroup128Sym, kInt8DynamicTokenAsym),
)
PAIRS = (*QUANTISED, (kInt8StaticChannelSym, None))
DEVICES = ("cpu", "sm80", "sm89", "sm90", "sm100", "sm120", "gfx942")
CLASSES = [experts for backend in Oracle(SCHEME).table() for experts in backend.load()]
EVERYTHING = Environment({item.distribution: "99.0" for c in CLASSES for item in c.claims.requires})
BASE = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=512, intermediate_size=256)


class TestKnownFaults(KnownFaultTests):
    scheme = "int8"
    keys = PAIRS


@pytest.mark.parametrize(
    "run",
    [
        run
        for run in TestKnownFaults.runs(Layers({}, quantized=True))
        if run.case.activation_key == kInt8StaticTensorAsym
    ],
    ids=lambda run: run.experts.__name__,
)
def test_zero_points_reach_the_result(run: Run) -> None:
    """They were loaded and dropped: the result would be that of other values."""
    problem, y = TestKnownFaults.check(run)
    weights, inputs = problem.weights.to("cpu"), problem.inputs.to("cpu")
    dropped = replace(weights, activation_key=kInt8StaticTensorSym, w13_input_zero_point=None, w2_input_zero_point=None)
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    asked, other = (fused_moe_reference(inputs.x, w, run.case.config, **routed) for w in (weights, dropped))
    found = y.cpu().double()
    assert 4 * float((found - asked).norm()) < float((found - other).norm())


# ------------------------------------------------------------------ one by one


def sixteen_bit(experts: int = 8) -> MoEWeights:
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    return MoEWeights(weight_key=None, activation_key=None, w13=make(experts, 512, 512), w2=make(experts, 512, 256))


def test_online_w8a8_is_not_w8a16(device: torch.device) -> None:
    """Its key said int8 activations, and its quant config, made without saying so again, 16-bit ones."""
    layer = FusedMoELayer.from_weights("int8", BASE, sixteen_bit().to(device), quantize="int8_per_channel")
    quant = layer.weights.quant_config
    assert (quant.activation_key, quant.a2.key) == (kInt8DynamicTokenSym, kInt8DynamicTokenSym)
    inputs = make_inputs(BASE, 24, seed=3)
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    y = layer(inputs.x.to(device), **{name: t.to(device) for name, t in routed.items()}).cpu().double()
    weights = moe_int8.quantize_moe_weights(sixteen_bit(), "int8_per_channel")
    quantized, plain = (
        fused_moe_reference(inputs.x, weights, BASE, **routed, quantize_activations=q) for q in (True, False)
    )
    assert float((y - quantized).norm()) < 0.5 * float((y - plain).norm())
    # and a quant config that says nothing of activations means int8 ones
    scale = torch.ones(8, 512, 1)
    assert moe_int8.make_int8_moe_quant_config(w1_scale=scale, w2_scale=scale).activation_key == kInt8DynamicTokenSym


def test_scales_are_those_of_the_local_experts() -> None:
    """They were sized for all experts of the layer, where this rank holds some."""
    config = replace(BASE, num_local_experts=3)
    plain = sixteen_bit(3)
    layer = FusedMoELayer.from_weights("int8", config, plain, quantize="int8_per_channel")
    quant = layer.weights.quant_config
    for scale, w in ((quant.w1_scale, plain.w13), (quant.w2_scale, plain.w2)):
        assert scale is not None
        torch.testing.assert_close(scale, w.float().abs().amax(dim=2, keepdim=True) / 127)


@pytest.mark.parametrize("experts", [c for c in CLASSES if hasattr(c, "plan")], ids=lambda c: c.__name__)
def test_launch_parameters_are_of_this_layer(experts: Any) -> None:
    """int8's tuning files could never be loaded, and the number of output rows was taken for that of experts.

    Nothing is loaded here: the parameters follow from the layer, and from its experts, not its rows.
    """
    key = next(w for w, _ in experts.claims.keys)
    weight_key = key if isinstance(key, QuantKey) else key.base
    activation_key = next(a for _, a in experts.claims.keys)

    def plan(num_experts: int, intermediate: int, tokens: int) -> Any:
        config = FusedMoEConfig(num_experts, 1, 4096, intermediate)
        made = experts(config, weight_key=weight_key, activation_key=activation_key, device=DeviceInfo.parse("sm90"))
        return made.plan(tokens)

    # as many rows per expert: 1 of 8 experts, or 512 of 4096, whatever the experts' sizes
    few, many = plan(512, 1024, 4096), plan(8, 1024, 4096)
    assert few.gemm1.block_m < many.gemm1.block_m
    for intermediate in (512, 2048, 8192):
        assert plan(8, intermediate, 4096).gemm1.block_m == many.gemm1.block_m


def test_static_activations_run_where_dynamic_ones_do() -> None:
    """They took a path of their own, past the selection."""
    for device in DEVICES:
        dynamic, static = (
            moe_int8.select_int8_moe_backend(BASE, activation_key=key, device=device, environment=EVERYTHING)
            for key in (kInt8DynamicTokenSym, kInt8StaticTensorSym)
        )
        assert static.experts is dynamic.experts
