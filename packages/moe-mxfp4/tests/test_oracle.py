"""The oracle's table, the choice by activation, and the functions that engines know it by."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import (
    ConfigError,
    Environment,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    MoEActivation,
    Oracle,
    QuantKey,
    RoutingConfig,
    RoutingMethodType,
    SelectionError,
    TensorError,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kInt8DynamicTokenSym,
    kMxfp4Dynamic,
    kMxfp4Static,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from moe_core.reference.tolerance import expected_output
from moe_core.testing.data import make_inputs, make_weights
from moe_mxfp4 import (
    Mxfp4MoeBackend,
    convert_to_mxfp4_moe_kernel_format,
    make_mxfp4_moe_kernel,
    make_mxfp4_moe_quant_config,
    mxfp4_round_up_hidden_size_and_intermediate_size,
    select_mxfp4_moe_backend,
)
from moe_mxfp4.experts.flashinfer_cutlass import FlashInferCutlassMxfp4Bf16Experts, FlashInferCutlassMxfp4Mxfp8Experts
from moe_mxfp4.experts.flashinfer_trtllm import TrtLlmMxfp4ExpertsModular, TrtLlmMxfp4ExpertsMonolithic
from moe_mxfp4.experts.oai_triton import OAITritonExperts
from moe_mxfp4.experts.torch import TorchMxfp4Experts
from moe_mxfp4.keys import ACTIVATIONS
from moe_mxfp4.scheme import SCHEME

#: gpt-oss-20b's layer
GPT_OSS = FusedMoEConfig(
    num_experts=32,
    top_k=4,
    hidden_size=2880,
    intermediate_size=2880,
    activation=MoEActivation.SWIGLUOAI,
    has_bias=True,
    routing=RoutingConfig.from_method(RoutingMethodType.Renormalize),
)
CONFIG = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=256, intermediate_size=128)
NOTHING = Environment({"triton": "3.6.0"})
EVERYTHING = Environment({"flashinfer-python": "0.7.2.post1", "triton_kernels": "1.0.0", "triton": "3.6.0"})
CLASSES = [experts for backend in Oracle(SCHEME).table() for experts in backend.load()]
CUTLASS = Mxfp4MoeBackend.FLASHINFER_CUTLASS


def select(device="sm90", config=GPT_OSS, environment=EVERYTHING, **options):
    return select_mxfp4_moe_backend(config, device=device, environment=environment, **options)


# -------------------------------------------------------- choice by activation


@pytest.mark.parametrize(
    ("device", "experts", "activation_key"),
    [
        ("sm90", FlashInferCutlassMxfp4Bf16Experts, None),
        ("sm100", FlashInferCutlassMxfp4Mxfp8Experts, kMxfp8Dynamic),
        ("sm103", FlashInferCutlassMxfp4Mxfp8Experts, kMxfp8Dynamic),
    ],
)
def test_a_named_backend_is_the_variant_that_the_device_has(device, experts, activation_key):
    for name in (CUTLASS, "flashinfer_cutlass"):
        selection = select(device, moe_backend=name)
        assert selection.experts is experts
        assert selection.activation_key == activation_key
        assert selection.backend == "flashinfer_cutlass"


def test_with_no_activation_asked_for_they_stay_in_16_bits():
    for device in ("sm80", "sm90", "sm100", "sm120", "gfx942", "cpu"):
        assert select(device).activation_key is None
    # also where a named backend has both
    for backend in ("flashinfer_trtllm", "torch"):
        assert select("sm100", moe_backend=backend).activation_key is None


@pytest.mark.parametrize("activation_key", [None, *ACTIVATIONS], ids=str)
@pytest.mark.parametrize("device", ["sm80", "sm90", "sm100", "gfx942", "cpu"])
def test_activations_that_were_asked_for_are_never_replaced(device, activation_key):
    selection = select(device, activation_key=activation_key)
    assert selection.activation_key == activation_key


def test_a_named_backend_without_the_activations_asked_for_is_refused():
    for device, activation_key in (("sm90", kMxfp8Dynamic), ("sm100", None), ("sm100", kFp8DynamicTokenSym)):
        with pytest.raises(SelectionError, match="'flashinfer_cutlass'"):
            select(device, moe_backend=CUTLASS, activation_key=activation_key)
    with pytest.raises(SelectionError, match="kMxfp8Dynamic"):
        select("sm90", moe_backend="triton_kernels", activation_key=kMxfp8Dynamic)


def test_a_backend_that_no_variant_helps_is_refused_with_its_reasons():
    with pytest.raises(SelectionError) as caught:
        select("sm80", moe_backend=CUTLASS)
    text = str(caught.value)
    assert "needs sm90, device is" in text
    assert "needs sm100 to sm109, device is" in text
    with pytest.raises(SelectionError, match="flashinfer-python"):
        select("sm100", moe_backend=CUTLASS, environment=NOTHING)


def test_backends_with_the_activations_asked_for_come_first():
    report = select("sm100", activation_key=kMxfp8Dynamic).report
    takes = [c.experts.claims.takes_keys(kMxfp4Static, kMxfp8Dynamic) for c in report.candidates]
    names = [candidate.backend for candidate in report.candidates]
    # classes of one backend stay together
    first = [any(t for t, other in zip(takes, names, strict=True) if other == name) for name in names]
    assert first == sorted(first, reverse=True)


def test_a_report_lists_every_candidate():
    everyone = {(backend.name, experts) for backend in Oracle(SCHEME).table() for experts in backend.load()}
    for device in ("sm90", "sm100", "gfx942", "cpu"):
        for activation_key in (None, kMxfp8Dynamic, kMxfp4Dynamic):
            report = select(device, activation_key=activation_key).report
            assert {(c.backend, c.experts) for c in report.candidates} == everyone
            assert len(report.candidates) == len(everyone)
            for candidate in report.candidates:
                assert candidate.fits or candidate.reasons
                assert candidate.backend in str(report)


# ------------------------------------------------------------------- devices


def test_each_device_has_a_backend_of_its_own():
    # Blackwell's monolithic kernel routes, its modular one is told
    assert select("sm100").experts is TrtLlmMxfp4ExpertsMonolithic
    assert select("sm100", replace(GPT_OSS, routing=None)).experts is TrtLlmMxfp4ExpertsModular
    assert select("sm100", activation_key=kMxfp8Dynamic).experts is TrtLlmMxfp4ExpertsMonolithic
    assert select("gfx942").backend == select("gfx950").backend == "triton"
    assert select("cpu").experts is TorchMxfp4Experts
    assert select("sm75").experts is TorchMxfp4Experts
    for device in ("sm80", "sm89", "sm90", "sm100", "sm120"):
        assert select(device, environment=NOTHING).backend == "marlin"
    batched = replace(GPT_OSS, activation_format=FusedMoEActivationFormat.BATCHED, max_num_tokens=64)
    assert select("sm90", batched).backend == "batched_marlin"
    # by the family's name too, and then in 16 bits as well
    named = select_mxfp4_moe_backend(batched, device="sm90", moe_backend="marlin")
    assert (named.backend, named.activation_key) == ("batched_marlin", None)
    assert select("cpu", batched).experts is TorchMxfp4Experts


def test_libraries_are_of_the_devices_that_they_say():
    def fits(device, activation_key=None, config=GPT_OSS):
        candidates = select(device, config, activation_key=activation_key).report.candidates
        return {c.experts for c in candidates if c.fits}

    assert OAITritonExperts in fits("sm90")
    assert FlashInferCutlassMxfp4Bf16Experts in fits("sm90")
    assert not fits("sm90") & {TrtLlmMxfp4ExpertsMonolithic, TrtLlmMxfp4ExpertsModular}
    assert not fits("sm100") & {OAITritonExperts, FlashInferCutlassMxfp4Bf16Experts}
    assert FlashInferCutlassMxfp4Mxfp8Experts in fits("sm100", kMxfp8Dynamic)
    for device in ("sm80", "sm120", "gfx942", "cpu"):
        names = {experts.__module__.rpartition(".")[2] for experts in fits(device)}
        assert not names & {"flashinfer_trtllm", "flashinfer_cutlass", "oai_triton"}


# ------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("weight_key", "activation_key", "message"),
    [
        (None, None, "kMxfp4Static .*16-bit"),
        (kMxfp8Static, kMxfp8Dynamic, "kMxfp8Static"),
        (replace(kMxfp4Static, permuted=True), None, "activation order"),
        (
            kMxfp4Static,
            kInt8DynamicTokenSym,
            "kInt8DynamicTokenSym",
        ),
    ],
)
def test_what_the_scheme_does_not_mean(weight_key, activation_key, message):
    with pytest.raises(ConfigError, match=message):
        select("cpu", weight_key=weight_key, activation_key=activation_key)


def test_a_named_backend_is_never_replaced():
    with pytest.raises(SelectionError, match="'flashinfer_trtllm' .*sm100"):
        select("sm90", moe_backend="flashinfer_trtllm")
    with pytest.raises(ConfigError, match="backend 'none'"):
        select("cpu", moe_backend="none")


def test_only_what_ran_on_hardware_says_so():
    for experts in CLASSES:
        if experts.claims.devices[0].kind == "cuda" and experts.claims.devices[0].min >= 100:
            assert experts.claims.verified_on == ()


# ------------------------------------------------------------- named functions


@pytest.mark.parametrize("activation_key", [None, kMxfp8Dynamic, kFp8Dynamic128Sym, kFp8StaticTensorSym], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_the_named_functions_make_a_layer(gated: bool, activation_key: QuantKey | None) -> None:
    config = replace(CONFIG, has_bias=True, activation="swigluoai" if gated else "relu2_no_mul")
    weights = make_weights(config, kMxfp4Static, activation_key, seed=0)
    selection = select_mxfp4_moe_backend(config, activation_key=activation_key, moe_backend="torch", device="cpu")
    kernel = make_mxfp4_moe_kernel(selection, convert_to_mxfp4_moe_kernel_format(selection, **dict(weights.tensors())))
    inputs = make_inputs(config, 3, seed=0)
    given = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    output = kernel.apply(inputs.x, **given)
    expected_output(inputs.x, weights, config, **given).compare(output, "result")


def test_the_quant_config_describes_canonical_weights():
    config = replace(CONFIG, has_bias=True)
    weights = make_weights(config, kMxfp4Static, kFp8StaticTensorSym, seed=0)
    quant = make_mxfp4_moe_quant_config(
        w1_scale=weights.w13_scale,
        w2_scale=weights.w2_scale,
        w1_bias=weights.w13_bias,
        w2_bias=weights.w2_bias,
        a1_scale=weights.w13_input_scale,
        a2_scale=weights.w2_input_scale,
        activation_key=kFp8StaticTensorSym,
    )
    assert (quant.weight_key, quant.activation_key) == (kMxfp4Static, kFp8StaticTensorSym)
    assert quant.w1_scale is weights.w13_scale
    assert quant.w2_bias is weights.w2_bias
    with pytest.raises(ConfigError, match="a1_scale"):
        make_mxfp4_moe_quant_config(
            w1_scale=weights.w13_scale, w2_scale=weights.w2_scale, activation_key=kFp8StaticTensorSym
        )


def test_tensors_that_do_not_fit_are_named():
    selection = select_mxfp4_moe_backend(CONFIG, moe_backend="torch", device="cpu")
    tensors = dict(make_weights(CONFIG, kMxfp4Static, None, seed=0).tensors())
    with pytest.raises(TensorError, match=r"w2_scale"):
        convert_to_mxfp4_moe_kernel_format(selection, **tensors | {"w2_scale": tensors["w2_scale"].float()})
    with pytest.raises(TensorError, match="w13_bias .*has_bias"):
        convert_to_mxfp4_moe_kernel_format(
            selection, **tensors, w13_bias=torch.zeros(8, 256), w2_bias=torch.zeros(8, 256)
        )


@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        ("flashinfer_trtllm", (3072, 2944)),
        ("flashinfer_cutlass", (2944, 2944)),
        ("triton_kernels", (2880, 2880)),
        ("torch", (2880, 2880)),
    ],
)
def test_sizes_inside_are_stated(backend, sizes):
    assert mxfp4_round_up_hidden_size_and_intermediate_size(backend, 2880, 2880) == sizes
    assert mxfp4_round_up_hidden_size_and_intermediate_size(Mxfp4MoeBackend(backend), 2880, 2880) == sizes
    # what is padded already stays
    assert mxfp4_round_up_hidden_size_and_intermediate_size(backend, *sizes) == sizes


def test_sizes_and_backends_that_are_none_are_refused():
    with pytest.raises(ConfigError, match=r"hidden_size .*\b0"):
        mxfp4_round_up_hidden_size_and_intermediate_size("torch", 0, 64)
    with pytest.raises(ConfigError, match="backend 'emulation'.*flashinfer_trtllm"):
        mxfp4_round_up_hidden_size_and_intermediate_size("emulation", 64, 64)
