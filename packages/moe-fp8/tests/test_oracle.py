"""The oracle's table and the functions that engines know it by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import moe_fp8
import pytest
import torch
from moe_core import (
    ConfigError,
    Environment,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    NoBackendError,
    QuantKey,
    SelectionError,
    TensorError,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kInt8StaticChannelSym,
    kMxfp8Dynamic,
    kMxfp8DynamicDown,
    kMxfp8DynamicEven,
    kMxfp8Static,
    oracle,
)
from moe_core.reference.fused_moe import fused_moe_reference
from moe_core.reference.quantization import quantize_moe_weights
from moe_fp8 import Fp8MoeBackend, select_fp8_moe_backend
from moe_fp8.experts.marlin import BatchedMarlinFp8Experts, MarlinFp8Experts, MarlinFp8QdqExperts
from moe_fp8.experts.torch import TorchFp8Experts
from moe_fp8.experts.triton import TritonFp8BlockExperts

CONFIG = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=256, intermediate_size=192)
WITH_TRITON = Environment({"triton": "3.6.0"})


@pytest.mark.parametrize(
    ("device", "backend", "experts"),
    [
        ("sm89", Fp8MoeBackend.TRITON, TritonFp8BlockExperts),
        ("sm90", Fp8MoeBackend.TRITON, TritonFp8BlockExperts),
        ("sm100", Fp8MoeBackend.TRITON, TritonFp8BlockExperts),
        ("sm120", Fp8MoeBackend.TRITON, TritonFp8BlockExperts),
        ("sm80", Fp8MoeBackend.TRITON, MarlinFp8QdqExperts),
        ("gfx942", Fp8MoeBackend.TRITON, TritonFp8BlockExperts),
        ("gfx950", Fp8MoeBackend.TRITON, TritonFp8BlockExperts),
        ("cpu", Fp8MoeBackend.TORCH, TorchFp8Experts),
    ],
)
def test_auto_follows_the_device(device: str, backend: Fp8MoeBackend, experts: type) -> None:
    selection = select_fp8_moe_backend(CONFIG, device=device, environment=WITH_TRITON)
    assert selection.backend == backend.value
    assert selection.experts is experts


@pytest.mark.parametrize("layout", FusedMoEActivationFormat)
@pytest.mark.parametrize(
    ("weight_key", "activation_key"),
    [
        (kFp8StaticTensorSym, kFp8StaticTensorSym),
        (kFp8StaticTensorSym, kFp8DynamicTokenSym),
        (kFp8StaticChannelSym, kFp8DynamicTokenSym),
        (kFp8Static128BlockSym, kFp8Dynamic128Sym),
        (kFp8Static128BlockSym.with_group(64, 64), kFp8Dynamic64Sym),
        (kMxfp8Static, kMxfp8Dynamic),
    ],
    ids=str,
)
def test_gpus_without_fp8_take_a_kernel(
    weight_key: QuantKey, activation_key: QuantKey, layout: FusedMoEActivationFormat
) -> None:
    """Ampere multiplies what FP8 activations are in bfloat16."""
    selection = select_fp8_moe_backend(
        replace(CONFIG, activation_format=layout),
        weight_key=weight_key,
        activation_key=activation_key,
        device="sm86",
        environment=WITH_TRITON,
    )
    assert selection.backend == "triton"
    assert selection.activation_key == activation_key


@pytest.mark.parametrize(
    ("device", "instead"),
    [
        (
            "cpu",
            "torch does not take activations quantized as kFp8StaticTensorSym (e4m3, static float32 per tensor), takes",
        ),
        ("sm80", "with 16-bit activations marlin fits (activation_key=None, --activation-key none)"),
        ("sm90", "with 16-bit activations marlin fits (activation_key=None, --activation-key none)"),
        ("gfx942", "with "),
    ],
)
def test_blocks_beside_static_activations_are_refused_by_name(device: str, instead: str) -> None:
    """Formats read them, and no backend takes them."""
    with pytest.raises(NoBackendError) as caught:
        oracle("fp8").select(
            CONFIG,
            weight_key=kFp8Static128BlockSym,
            activation_key=kFp8StaticTensorSym,
            device=device,
            environment=WITH_TRITON,
        )
    what = "fp8: no backend takes kFp8Static128BlockSym weights with kFp8StaticTensorSym activations: "
    assert caught.value.message.startswith(f"{what}{instead}")


@pytest.mark.parametrize("key", [kMxfp8DynamicDown, kMxfp8DynamicEven], ids=str)
@pytest.mark.parametrize(("device", "backend"), [("sm90", "triton"), ("sm100", "triton"), ("cpu", "torch")])
def test_scales_that_tools_round_otherwise(key: QuantKey, device: str, backend: str) -> None:
    """Libraries round activations' scales up: they are refused, and the project's kernels taken."""
    libraries = Environment({"triton": "3.6.0", "flashinfer": "99.0", "deep_gemm": "99.0"})
    selection = select_fp8_moe_backend(
        CONFIG, weight_key=kMxfp8Static, activation_key=key, device=device, environment=libraries
    )
    assert selection.backend == backend


@pytest.mark.parametrize("device", ["sm80", "sm90", "sm100"])
def test_16_bit_activations_go_to_marlin(device: str) -> None:
    def backend(weight_key: QuantKey, **changes: Any) -> str:
        config = replace(CONFIG, **changes)
        return select_fp8_moe_backend(
            config, weight_key=weight_key, activation_key=None, device=device, environment=WITH_TRITON
        ).backend

    batched = FusedMoEActivationFormat.BATCHED
    for key in (kMxfp8Static, kFp8StaticChannelSym, kFp8Static128BlockSym):
        assert backend(key) == "marlin"
        assert backend(key, intermediate_size=2048) == "marlin"
        assert backend(key, activation_format=batched) == "batched_marlin"
    assert backend(kMxfp8Static, dtype=torch.float32) == "marlin"


@pytest.mark.parametrize("key", [kMxfp8Static, kFp8StaticChannelSym, kFp8Static128BlockSym], ids=str)
def test_triton_names_the_kernels_for_16_bit_activations(key: QuantKey) -> None:
    for config, experts in (
        (CONFIG, MarlinFp8Experts),
        (replace(CONFIG, activation_format=FusedMoEActivationFormat.BATCHED), BatchedMarlinFp8Experts),
    ):
        selection = select_fp8_moe_backend(
            config,
            weight_key=key,
            activation_key=None,
            moe_backend="triton",
            device="sm80",
            environment=WITH_TRITON,
        )
        assert selection.experts is experts
        assert selection.backend == ("marlin" if experts is MarlinFp8Experts else "batched_marlin")
        assert [c.experts for c in selection.report.candidates].count(experts) == 1


def test_without_triton_there_is_still_torch() -> None:
    selection = select_fp8_moe_backend(CONFIG, device="sm90", environment=Environment({}))
    assert selection.backend == "torch"
    assert "needs triton, which is not installed" in str(selection.report)


def test_the_batched_format_has_its_backend() -> None:
    batched = replace(CONFIG, activation_format=FusedMoEActivationFormat.BATCHED)
    assert select_fp8_moe_backend(batched, device="sm90", environment=WITH_TRITON).backend == "triton"
    assert select_fp8_moe_backend(batched, device="cpu").backend == "torch"


def test_a_named_backend_is_never_replaced() -> None:
    with pytest.raises(
        SelectionError,
        match=r"'triton' (.*\n)*.*sm89",
    ):
        select_fp8_moe_backend(CONFIG, moe_backend=Fp8MoeBackend.TRITON, device="cpu")


@pytest.mark.parametrize(
    ("weight_key", "activation_key"),
    [
        (kMxfp8Static, kFp8Dynamic128Sym),
        (kFp8Static128BlockSym, kFp8DynamicTokenSym),
        (kFp8StaticChannelSym, kMxfp8Dynamic),
        (kFp8Static128BlockSym.with_group(64, 64), kFp8Dynamic128Sym),
        (kFp8Static128BlockSym, kFp8Dynamic64Sym),
    ],
)
def test_no_key_is_taken_for_another(weight_key, activation_key) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SelectionError, match="backend"):
        select_fp8_moe_backend(CONFIG, weight_key=weight_key, activation_key=activation_key, device="cpu")


def test_another_schemes_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="kInt8StaticChannelSym"):
        select_fp8_moe_backend(CONFIG, weight_key=kInt8StaticChannelSym, activation_key=None, device="cpu")


def test_the_named_functions_make_a_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = quantize_moe_weights(
        torch.randn(8, 384, 256, generator=generator) / 16,
        torch.randn(8, 256, 192, generator=generator) / 14,
        gated=True,
        weight_key=kFp8Static128BlockSym,
        activation_key=kFp8Dynamic128Sym,
    )
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    selection = select_fp8_moe_backend(CONFIG, device="cpu")
    converted = moe_fp8.convert_to_fp8_moe_kernel_format(
        selection, w13=weights.w13, w2=weights.w2, w13_scale=weights.w13_scale, w2_scale=weights.w2_scale
    )
    kernel = moe_fp8.make_fp8_moe_kernel(selection, converted)
    x = torch.randn(9, 256, generator=generator).to(torch.bfloat16)
    topk_weights = torch.rand(9, 2, generator=generator)
    topk_ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(9)])
    out = kernel.apply(x, topk_weights=topk_weights, topk_ids=topk_ids)
    expected = fused_moe_reference(x, weights, CONFIG, topk_weights=topk_weights, topk_ids=topk_ids)
    # float32 arithmetic: what is left is the output's rounding to bf16, half a step of 2^-8 at most per element
    assert float((out.double() - expected).norm() / expected.norm()) < 2.0**-9 * 1.1
    with pytest.raises(TensorError, match=r"w13_scale .*\[8, 3, 2\]"):
        moe_fp8.convert_to_fp8_moe_kernel_format(
            selection, w13=weights.w13, w2=weights.w2, w13_scale=weights.w13_scale[:, :3], w2_scale=weights.w2_scale
        )


def test_the_quant_config_says_what_the_layer_is() -> None:
    scale = torch.ones(8, 4, 2)
    config = moe_fp8.make_fp8_moe_quant_config(w1_scale=scale, w2_scale=scale, block_shape=(128, 128))
    assert (config.weight_key, config.activation_key) == (kFp8Static128BlockSym, kFp8Dynamic128Sym)
    only = moe_fp8.make_fp8_moe_quant_config(w1_scale=scale, w2_scale=scale, block_shape=(128, 128), weight_only=True)
    assert (only.weight_key, only.activation_key) == (kFp8Static128BlockSym, None)
