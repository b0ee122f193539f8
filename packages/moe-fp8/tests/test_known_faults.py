"""Silent faults that fused MoE layers have had elsewhere, as tests of every FP8 backend.

Each says the fault in its name; each fails where a backend has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

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
    MoEActivation,
    MoEWeights,
    QuantKey,
    RoutingConfig,
    Selection,
    SelectionError,
    fused_moe_reference,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
    kMxfp8Static,
    registry,
)
from moe_core.claims import key_matches
from moe_core.testing.data import make_inputs, make_weights
from moe_core.testing.tolerance import Expected, expected_output
from moe_fp8 import Fp8Oracle
from torch import Tensor

W8A8 = (
    (kFp8StaticTensorSym, kFp8DynamicTensorSym),
    (kFp8StaticTensorSym, kFp8StaticTensorSym),
    (kFp8StaticTensorSym, kFp8DynamicTokenSym),
    (kFp8StaticChannelSym, kFp8DynamicTokenSym),
    (kFp8Static128BlockSym, kFp8Dynamic128Sym),
    (kMxfp8Static, kMxfp8Dynamic),
)
WEIGHT_ONLY = tuple((key, None) for key in dict.fromkeys(weight for weight, _ in W8A8))
DEVICES = ("cpu", "sm80", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950")
CLASSES = [experts for backend in Fp8Oracle().table() for experts in backend.load()]
#: an installation that lacks nothing: what is refused there, is refused for its own sake
EVERYTHING = Environment({item.distribution: "99.0" for c in CLASSES for item in c.claims.requires})
BASE = FusedMoEConfig(
    num_experts=8,
    top_k=2,
    hidden_size=512,
    intermediate_size=256,
    routing=RoutingConfig(renormalize=True),
)


def requests(experts: type[FusedMoEExperts]) -> Iterator[tuple[FusedMoEConfig, QuantKey, QuantKey | None, DeviceInfo]]:
    """Layers without biases or limits that the class runs, one for each pair of keys, activation and device."""
    for activation_format in sorted(experts.claims.formats, key=lambda item: item.value):
        for activation in sorted(experts.claims.activations, key=lambda item: item.value):
            config = replace(BASE, activation=activation, activation_format=activation_format)
            for weight_key, activation_key in (*W8A8, *WEIGHT_ONLY):
                for device in map(DeviceInfo.parse, DEVICES):
                    if not experts.unsupported_reasons(config, weight_key, activation_key, device, EVERYTHING):
                        yield config, weight_key, activation_key, device


@pytest.mark.parametrize("experts", CLASSES, ids=lambda c: c.__name__)
def test_every_class_runs_something_here(experts: type[FusedMoEExperts]) -> None:
    """What follows would hold of no request at all."""
    assert next(requests(experts), None) is not None


@pytest.mark.parametrize("experts", CLASSES, ids=lambda c: c.__name__)
def test_biases_are_added_or_refused(experts: type[FusedMoEExperts]) -> None:
    for config, weight_key, activation_key, device in requests(experts):
        reasons = experts.unsupported_reasons(
            replace(config, has_bias=True), weight_key, activation_key, device, EVERYTHING
        )
        assert ("does not add biases" in reasons) == (not experts.claims.bias)


@pytest.mark.parametrize("experts", CLASSES, ids=lambda c: c.__name__)
def test_clamp_limits_are_honoured_or_refused(experts: type[FusedMoEExperts]) -> None:
    for config, weight_key, activation_key, device in requests(experts):
        limited = replace(config, activation_params=ActivationParams(limit=3.5))
        reasons = experts.unsupported_reasons(limited, weight_key, activation_key, device, EVERYTHING)
        refused = [reason for reason in reasons if "does not clamp" in reason]
        assert bool(refused) == (not experts.claims.limits(config.activation))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("weight_key", "activation_key"), W8A8, ids=str)
def test_w8a8_never_runs_as_w8a16(weight_key: QuantKey, activation_key: QuantKey, device: str) -> None:
    """A class that only dequantises weights is no candidate where quantised activations were asked for."""
    oracle = registry().oracle("fp8")
    for activation_format in FusedMoEActivationFormat:
        config = replace(BASE, activation_format=activation_format)
        try:
            report = oracle.select(
                config, weight_key=weight_key, activation_key=activation_key, device=device, environment=EVERYTHING
            ).report
        except SelectionError as error:
            report = error.report
        for candidate in report.candidates:
            pairs = candidate.experts.claims.keys
            takes = any(
                key_matches(w, weight_key) and a is not None and key_matches(a, activation_key) for w, a in pairs
            )
            assert takes or not candidate.fits


def runnable() -> list[tuple[Selection, str]]:
    """Every backend's every pair of keys that runs in this process, on its GPU or on the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    oracle, found = registry().oracle("fp8"), []
    for weight_key, activation_key in (*W8A8, *WEIGHT_ONLY):
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
            if not selection.experts.is_monolithic:
                found.append((selection, f"{backend.name}-{weight_key}-{activation_key}"))
    return found


RUNNABLE = runnable()
RUNS = pytest.mark.parametrize("selection", [s for s, _ in RUNNABLE], ids=[name for _, name in RUNNABLE])
WEIGHT_ONLY_RUNS = pytest.mark.parametrize(
    "selection",
    [s for s, _ in RUNNABLE if s.activation_key is None],
    ids=[name for s, name in RUNNABLE if s.activation_key is None],
)


def for_layer(selection: Selection, config: FusedMoEConfig) -> Selection:
    """The same backend for another layer; SelectionError where it refuses."""
    return (
        registry()
        .oracle("fp8")
        .select(
            config,
            weight_key=selection.weight_key,
            activation_key=selection.activation_key,
            moe_backend=selection.backend,
            device=selection.device,
        )
    )


def canonical(selection: Selection, device: torch.device, seed: int = 0) -> MoEWeights:
    config = selection.config
    return make_weights(config, selection.weight_key, selection.activation_key, seed=seed).to(device)


def check(selection: Selection, device: torch.device) -> tuple[Tensor, Expected]:
    """Run the layer and compare it with the reference; the output, and what was expected."""
    oracle, weights = registry().oracle("fp8"), canonical(selection, device)
    inputs = make_inputs(selection.config, 24, seed=3).to(device)
    kernel = oracle.make_kernel(selection, oracle.convert(selection, weights))
    y = kernel.apply(inputs.x, topk_weights=inputs.topk_weights, topk_ids=inputs.topk_ids)
    expected = expected_output(
        inputs.x,
        kernel.experts.requantized(weights),
        selection.config,
        topk_weights=inputs.topk_weights,
        topk_ids=inputs.topk_ids,
        compute_dtype=selection.config.dtype,
    )
    expected.compare(y, selection.backend)
    return y, expected


@RUNS
def test_biases_reach_the_result(selection: Selection, device: torch.device) -> None:
    """Where they are claimed; the reference adds them after the product, before the activation."""
    if not selection.experts.claims.bias:
        with pytest.raises(SelectionError, match="does not add biases"):
            for_layer(selection, replace(BASE, has_bias=True))
        return
    check(for_layer(selection, replace(BASE, has_bias=True)), device)


@RUNS
def test_limits_reach_the_result(selection: Selection, device: torch.device) -> None:
    limited = replace(BASE, activation_params=ActivationParams(limit=0.75))
    if not selection.experts.claims.limits(limited.activation):
        with pytest.raises(SelectionError, match="does not clamp"):
            for_layer(selection, limited)
        return
    check(for_layer(selection, limited), device)


@pytest.mark.parametrize(
    "selection",
    [s for s, _ in RUNNABLE if s.activation_key is not None],
    ids=[name for s, name in RUNNABLE if s.activation_key is not None],
)
def test_activations_are_quantised_where_asked(selection: Selection, device: torch.device) -> None:
    """The result is nearer to the layer with quantised activations than to that with 16-bit ones.

    Errors of an implementation have no reason to point from the one to the other, in 24 x 512 dimensions.
    """
    y, expected = check(selection, device)
    inputs, weights = make_inputs(selection.config, 24, seed=3), canonical(selection, torch.device("cpu"))
    plain = fused_moe_reference(
        inputs.x,
        replace(weights, activation_key=None, w13_input_scale=None, w2_input_scale=None),
        selection.config,
        topk_weights=inputs.topk_weights,
        topk_ids=inputs.topk_ids,
    )
    found = y.cpu().double()
    assert float((found - expected.exact.cpu()).norm()) < float((found - plain).norm())


@pytest.mark.parametrize("sizes", [(200, 104), (136, 72), (160, 96)], ids=str)
@pytest.mark.parametrize(
    "activation", [MoEActivation.RELU2_NO_MUL, MoEActivation.SILU_NO_MUL, MoEActivation.GELU_NO_MUL], ids=str
)
@WEIGHT_ONLY_RUNS
def test_weights_alone_without_a_gate_in_sizes_that_need_padding(
    selection: Selection, activation: MoEActivation, sizes: tuple[int, int], device: torch.device
) -> None:
    """Computed, or refused for its sizes or its activation; never taken for gate and up."""
    hidden, inter = sizes
    config = replace(BASE, hidden_size=hidden, intermediate_size=inter, activation=activation)
    try:
        narrow = for_layer(selection, config)
    except SelectionError as error:
        reasons = error.report.candidates
        mine = [
            reason for candidate in reasons if candidate.backend == selection.backend for reason in candidate.reasons
        ]
        assert any("to be a multiple of" in reason or "does not compute the activation" in reason for reason in mine)
        return
    check(narrow, device)


def same_bytes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    def raw(tensor: Tensor) -> Tensor:
        return tensor.contiguous().flatten().view(torch.uint8)

    return found.keys() == expected.keys() and all(torch.equal(raw(t), raw(expected[n])) for n, t in found.items())


@RUNS
def test_converting_twice_gives_the_same_and_leaves_the_source(selection: Selection, device: torch.device) -> None:
    oracle, weights = registry().oracle("fp8"), canonical(selection, device)
    before = {name: tensor.clone() for name, tensor in weights.tensors()}
    first = {name: tensor.clone() for name, tensor in oracle.convert(selection, weights).tensors()}
    kernel = oracle.make_kernel(selection, oracle.convert(selection, weights))
    inputs = make_inputs(selection.config, 5, seed=3).to(device)
    kernel.apply(inputs.x, topk_weights=inputs.topk_weights, topk_ids=inputs.topk_ids)
    assert same_bytes(dict(oracle.convert(selection, weights).tensors()), first)
    assert same_bytes(dict(weights.tensors()), before)


@RUNS
def test_reloading_gives_the_new_layer_in_place(selection: Selection, device: torch.device) -> None:
    """Also in a CUDA graph that was captured with the old weights."""
    oracle = registry().oracle("fp8")
    old, new = canonical(selection, device), canonical(selection, device, seed=1)
    inputs = make_inputs(selection.config, 24, seed=3).to(device)
    arguments = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    layer = FusedMoELayer.from_weights(oracle, selection.config, old, backend=selection.backend, copy=True)
    fresh = FusedMoELayer.from_weights(oracle, selection.config, new, backend=selection.backend)
    replay = None
    out = torch.empty_like(inputs.x)
    if device.type == "cuda" and selection.experts.claims.cuda_graph:
        layer.kernel.apply(inputs.x, output=out, **arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer.kernel.apply(inputs.x, output=out, **arguments)
        replay = graph.replay
    for weights in (new, old, new):
        layer.reload(weights)
    want = fresh(inputs.x, **arguments)
    assert torch.equal(layer(inputs.x, **arguments), want)
    if replay is not None:
        out.fill_(float("nan"))
        replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)
