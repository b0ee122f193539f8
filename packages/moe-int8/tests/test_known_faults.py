"""Silent faults that fused MoE layers have had elsewhere, as tests of every INT8 backend.

Each says the fault in its name; each fails where a backend has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import moe_int8
import pytest
import torch
from moe_core import (
    ActivationParams,
    DeviceInfo,
    Environment,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEExperts,
    FusedMoELayer,
    MoEWeights,
    QuantKey,
    Selection,
    SelectionError,
    fused_moe_reference,
    kInt4W4A8StaticChannelSym,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTensorSym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kInt8StaticTensorAsym,
    kInt8StaticTensorSym,
    registry,
)
from moe_core.claims import key_matches
from moe_core.quantization import dequantize_weight
from moe_core.testing.data import make_inputs, make_weights
from moe_core.testing.tolerance import Expected, expected_output
from moe_int8 import Int8Oracle
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
CLASSES = [experts for backend in Int8Oracle().table() for experts in backend.load()]
EVERYTHING = Environment({item.distribution: "99.0" for c in CLASSES for item in c.claims.requires})
BASE = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=512, intermediate_size=256)


def requests(experts: type[FusedMoEExperts]) -> Iterator[tuple[FusedMoEConfig, QuantKey, QuantKey | None, DeviceInfo]]:
    """Layers without biases or limits that the class runs, one for each pair of keys, activation and device."""
    for activation_format in sorted(experts.claims.formats, key=lambda item: item.value):
        for activation in sorted(experts.claims.activations, key=lambda item: item.value):
            config = replace(BASE, activation=activation, activation_format=activation_format)
            for weight_key, activation_key in PAIRS:
                for device in map(DeviceInfo.parse, DEVICES):
                    if not experts.unsupported_reasons(config, weight_key, activation_key, device, EVERYTHING):
                        yield config, weight_key, activation_key, device


@pytest.mark.parametrize("experts", CLASSES, ids=lambda c: c.__name__)
def test_biases_and_limits_are_honoured_or_refused(experts: type[FusedMoEExperts]) -> None:
    count = 0
    for count, (config, *request) in enumerate(requests(experts), 1):  # noqa: B007 - the last number is asked for
        reasons = experts.unsupported_reasons(replace(config, has_bias=True), *request, EVERYTHING)
        assert ("does not add biases" in reasons) == (not experts.claims.bias)
        limited = replace(config, activation_params=ActivationParams(limit=3.5))
        reasons = experts.unsupported_reasons(limited, *request, EVERYTHING)
        assert any("does not clamp" in reason for reason in reasons) == (not experts.claims.limits(config.activation))
    assert count


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("weight_key", "activation_key"), QUANTISED, ids=str)
def test_w8a8_never_runs_as_w8a16(weight_key: QuantKey, activation_key: QuantKey, device: str) -> None:
    """A class that only widens weights is no candidate where quantised activations were asked for."""
    for activation_format in FusedMoEActivationFormat:
        config = replace(BASE, activation_format=activation_format)
        arguments: dict[str, Any] = {"device": device, "environment": EVERYTHING}
        try:
            report = (
                registry()
                .oracle("int8")
                .select(config, weight_key=weight_key, activation_key=activation_key, **arguments)
                .report
            )
        except SelectionError as error:
            report = error.report
        for candidate in report.candidates:
            takes = any(
                key_matches(w, weight_key) and a is not None and key_matches(a, activation_key)
                for w, a in candidate.experts.claims.keys
            )
            assert takes or not candidate.fits


def runnable() -> list[tuple[Selection, str]]:
    """Every backend's every pair of keys that runs in this process, on its GPU or on the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    oracle, found = registry().oracle("int8"), []
    for weight_key, activation_key in PAIRS:
        for backend in oracle.table():
            try:
                selection = oracle.select(
                    BASE,
                    weight_key=weight_key,
                    activation_key=activation_key,
                    moe_backend=backend.name,
                    device=device,
                )
            except SelectionError:
                continue
            found.append((selection, f"{backend.name}-{weight_key}-{activation_key}"))
    return found


RUNNABLE = runnable()
RUNS = pytest.mark.parametrize("selection", [s for s, _ in RUNNABLE], ids=[name for _, name in RUNNABLE])
INT8_RUNS = pytest.mark.parametrize(
    "selection",
    [s for s, _ in RUNNABLE if s.activation_key is not None],
    ids=[name for s, name in RUNNABLE if s.activation_key is not None],
)


def canonical(selection: Selection, device: torch.device, seed: int = 0) -> MoEWeights:
    return make_weights(selection.config, selection.weight_key, selection.activation_key, seed=seed).to(device)


def check(selection: Selection, device: torch.device) -> tuple[Tensor, Expected]:
    """Run the layer and compare it with the reference; the output, and what was expected."""
    oracle, weights = registry().oracle("int8"), canonical(selection, device)
    inputs = make_inputs(selection.config, 24, seed=3).to(device)
    kernel = oracle.make_kernel(selection, oracle.convert(selection, weights))
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    y = kernel.apply(inputs.x, **routed)
    expected = expected_output(inputs.x, weights, selection.config, **routed, compute_dtype=selection.config.dtype)
    expected.compare(y, selection.backend)
    return y, expected


@RUNS
def test_biases_reach_the_result(selection: Selection, device: torch.device) -> None:
    """Also in W8A16."""
    biased = (
        registry()
        .oracle("int8")
        .select(
            replace(BASE, has_bias=True),
            weight_key=selection.weight_key,
            activation_key=selection.activation_key,
            moe_backend=selection.backend,
            device=selection.device,
        )
    )
    check(biased, device)


@INT8_RUNS
def test_activations_are_quantised_where_asked(selection: Selection, device: torch.device) -> None:
    """The result is nearer to the layer with quantised activations than to that with 16-bit ones."""
    y, expected = check(selection, device)
    inputs, weights = make_inputs(selection.config, 24, seed=3), canonical(selection, torch.device("cpu"))
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    plain = fused_moe_reference(inputs.x, weights, selection.config, **routed, quantize_activations=False)
    found = y.cpu().double()
    assert float((found - expected.exact.cpu()).norm()) < float((found - plain).norm())


@RUNS
def test_reloading_gives_the_new_layer_in_place(selection: Selection, device: torch.device) -> None:
    """With everything that goes with the weights: sums of codes for zero points, static scales."""
    oracle = registry().oracle("int8")
    old, new = canonical(selection, device), canonical(selection, device, seed=1)
    inputs = make_inputs(selection.config, 24, seed=3).to(device)
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    layer = FusedMoELayer.from_weights(oracle, selection.config, old, backend=selection.backend, copy=True)
    fresh = FusedMoELayer.from_weights(oracle, selection.config, new, backend=selection.backend)
    pointers = [tensor.data_ptr() for _, tensor in layer.weights.tensors()]
    for weights in (new, old, new):
        layer.reload(weights)
    assert [tensor.data_ptr() for _, tensor in layer.weights.tensors()] == pointers
    assert torch.equal(layer(inputs.x, **routed), fresh(inputs.x, **routed))


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
    quantised, plain = (
        fused_moe_reference(inputs.x, weights, BASE, **routed, quantize_activations=q) for q in (True, False)
    )
    assert float((y - quantised).norm()) < 0.5 * float((y - plain).norm())
    # and a quant config that says nothing of activations means int8 ones
    scale = torch.ones(8, 512, 1)
    assert moe_int8.make_int8_moe_quant_config(w1_scale=scale, w2_scale=scale).activation_key == kInt8DynamicTokenSym


@pytest.mark.parametrize("name", ["int8_per_channel", "int8_per_channel_w8a16"])
def test_a_channel_of_zeros_is_no_nan(name: str, device: torch.device) -> None:
    """Its scale was 0, and its codes 0/0."""
    weights = sixteen_bit()
    weights.w13[:, 3] = 0.0
    weights.w2[2] = 0.0
    found = moe_int8.quantize_moe_weights(weights.to(device), name)
    found.validate(BASE, values=True)
    assert found.weight_key is not None
    assert found.w13_scale is not None
    values = dequantize_weight(found.w13, found.w13_scale, found.weight_key, parts=2)
    assert not bool(values[:, 3].any())
    assert not bool(found.w2[2].any())
    assert bool((found.w13_scale > 0).all())
    layer = FusedMoELayer.from_weights("int8", BASE, found)
    inputs = make_inputs(BASE, 24, seed=3).to(device)
    assert bool(layer(inputs.x, topk_weights=inputs.topk_weights, topk_ids=inputs.topk_ids).isfinite().all())


def test_scales_are_those_of_the_local_experts() -> None:
    """They were sized for all experts of the layer, where this rank holds some."""
    config = replace(BASE, num_local_experts=3)
    layer = FusedMoELayer.from_weights("int8", config, sixteen_bit(3), quantize="int8_per_channel")
    quant = layer.weights.quant_config
    assert quant.w1_scale is not None
    assert quant.w2_scale is not None
    assert (quant.w1_scale.shape[0], quant.w2_scale.shape[0]) == (3, 3)


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
    assert few.up.block_m < many.up.block_m
    for intermediate in (512, 2048, 8192):
        assert plan(8, intermediate, 4096).up.block_m == many.up.block_m


@INT8_RUNS
def test_zero_points_reach_the_result(selection: Selection, device: torch.device) -> None:
    """They were loaded and dropped: the result would be that of other values."""
    key = selection.activation_key
    assert key is not None
    if key.symmetric:
        return
    y, expected = check(selection, device)
    if not key.is_static:
        return
    inputs, weights = make_inputs(selection.config, 24, seed=3), canonical(selection, torch.device("cpu"))
    dropped = replace(weights, activation_key=kInt8StaticTensorSym, w13_input_zero_point=None, w2_input_zero_point=None)
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    other = fused_moe_reference(inputs.x, dropped, selection.config, **routed)
    found = y.cpu().double()
    assert 4 * float((found - expected.exact.cpu()).norm()) < float((found - other).norm())


def test_static_activations_run_where_dynamic_ones_do() -> None:
    """They took a path of their own, past the selection."""
    for device in DEVICES:
        dynamic, static = (
            moe_int8.select_int8_moe_backend(BASE, activation_key=key, device=device, environment=EVERYTHING)
            for key in (kInt8DynamicTokenSym, kInt8StaticTensorSym)
        )
        assert static.experts is dynamic.experts
