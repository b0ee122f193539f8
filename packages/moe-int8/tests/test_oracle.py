"""The oracle's table and the functions that engines know it by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import moe_int8
import pytest
import torch
from moe_core import (
    ConfigError,
    Environment,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEExperts,
    MoEWeights,
    Oracle,
    QuantKey,
    SelectionError,
    TensorError,
    kFp8StaticChannelSym,
    kInt4Static,
    kInt4W4A8StaticChannelSym,
    kInt4W4A8StaticGroup32Sym,
    kInt4W4A8StaticGroup64Sym,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTensorSym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8Static,
    kInt8StaticChannelSym,
    kInt8StaticTensorAsym,
    kInt8StaticTensorSym,
)
from moe_core.cli.commands.backends import describe
from moe_core.reference.fused_moe import fused_moe_reference
from moe_core.testing.data import make_inputs, make_weights
from moe_int8 import Int8MoeBackend, select_int8_moe_backend, select_w4a8_int8_moe_backend
from moe_int8.experts.torch import TorchInt8Experts
from moe_int8.experts.triton_w4a8 import TritonW4A8Int8Experts
from moe_int8.scheme import SCHEME

CONFIG = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=256, intermediate_size=128)
WITH_TRITON = Environment({"triton": "3.6.0"})
ACTIVATIONS = (
    kInt8DynamicTokenSym,
    kInt8DynamicTokenAsym,
    kInt8StaticTensorSym,
    kInt8StaticTensorAsym,
    kInt8DynamicTensorSym,
    None,
)


@pytest.mark.parametrize("device", ["gfx942", "gfx950"])
def test_amd_takes_triton_with_int8_activations(device: str) -> None:
    for key in ACTIVATIONS:
        chosen = select_int8_moe_backend(CONFIG, activation_key=key, device=device, environment=WITH_TRITON).backend
        assert chosen == ("torch" if key is None else "triton")


@pytest.mark.parametrize("device", ["sm80", "sm89", "sm90", "sm100", "sm120"])
@pytest.mark.parametrize("activation_key", [kInt8DynamicTokenSym, None], ids=str)
def test_a_gpu_takes_triton(device: str, activation_key: QuantKey | None) -> None:
    selection = select_int8_moe_backend(CONFIG, activation_key=activation_key, device=device, environment=WITH_TRITON)
    assert selection.backend == Int8MoeBackend.TRITON.value
    four_bits = select_w4a8_int8_moe_backend(CONFIG, device=device, environment=WITH_TRITON)
    # measured on sm_90 alone
    assert four_bits.backend == (Int8MoeBackend.MARLIN.value if device == "sm90" else Int8MoeBackend.TRITON.value)


@pytest.mark.parametrize("device", ["cpu", "sm75"])
@pytest.mark.parametrize("activation_key", ACTIVATIONS, ids=str)
def test_every_other_device_takes_torch(device: str, activation_key: QuantKey | None) -> None:
    for layout in FusedMoEActivationFormat:
        config = replace(CONFIG, activation_format=layout)
        selection = select_int8_moe_backend(
            config, activation_key=activation_key, device=device, environment=WITH_TRITON
        )
        assert selection.experts is TorchInt8Experts


@pytest.mark.parametrize(
    "weight_key",
    [
        kInt4W4A8StaticChannelSym,
        kInt4W4A8StaticGroup128Sym,
        kInt4W4A8StaticGroup64Sym,
        kInt4W4A8StaticGroup32Sym,
        kInt4W4A8StaticGroup128Sym.with_scale_dtype(torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("activation_key", [kInt8DynamicTokenSym, kInt8DynamicTokenAsym], ids=str)
def test_w4a8(weight_key: QuantKey, activation_key: QuantKey) -> None:
    selection = select_w4a8_int8_moe_backend(CONFIG, weight_key=weight_key, activation_key=activation_key, device="cpu")
    assert selection.experts is TorchInt8Experts


def test_without_triton_there_is_still_torch() -> None:
    selection = select_int8_moe_backend(CONFIG, device="sm90", environment=Environment({}))
    assert selection.backend == "torch"
    assert "needs triton, which is not installed" in str(selection.report)


def test_a_named_backend_is_never_replaced() -> None:
    with pytest.raises(
        SelectionError,
        match=r"'triton' (.*\n)*.*sm80",
    ):
        select_int8_moe_backend(CONFIG, moe_backend=Int8MoeBackend.TRITON, device="cpu")
    with pytest.raises(ConfigError, match="backend 'cutlass'"):
        select_int8_moe_backend(CONFIG, moe_backend="cutlass", device="cpu")


@pytest.mark.parametrize(
    ("weight_key", "activation_key", "message"),
    [
        (kInt8StaticChannelSym.with_group(1, 128), kInt8DynamicTokenSym, "does not read weights quantized as"),
        (kInt8StaticChannelSym, kInt8DynamicTokenSym.with_group(1, 128), "does not take activations quantized as"),
        (kInt4W4A8StaticGroup128Sym.with_group(1, 96), kInt8DynamicTokenSym, "does not read weights quantized as"),
        (kInt4W4A8StaticGroup128Sym, kInt8StaticTensorSym, "does not take activations quantized as"),
    ],
)
def test_no_key_is_taken_for_another(weight_key: QuantKey, activation_key: QuantKey, message: str) -> None:
    select: Any = select_int8_moe_backend if weight_key.dtype.bits == 8 else select_w4a8_int8_moe_backend
    with pytest.raises(SelectionError, match=rf"backend (.*\n)*.*{message}"):
        select(CONFIG, weight_key=weight_key, activation_key=activation_key, device="cpu")


@pytest.mark.parametrize(
    ("weight_key", "activation_key", "message"),
    [
        (kFp8StaticChannelSym, None, "kFp8StaticChannelSym"),
        (kInt4W4A8StaticChannelSym, kInt8DynamicTokenSym, "use select_w4a8_int8_moe_backend"),
        (kInt8Static, None, "kInt8Static"),
    ],
)
def test_other_weights_are_refused(weight_key: QuantKey, activation_key: QuantKey | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_int8_moe_backend(CONFIG, weight_key=weight_key, activation_key=activation_key, device="cpu")


def test_the_oracle_refuses_what_other_schemes_read() -> None:
    oracle = Oracle(SCHEME)
    for weight_key, message in (
        (kInt4Static, "kInt4Static"),
        (None, "16-bit weights"),
        (replace(kInt8StaticChannelSym, symmetric=False), "zero points"),
        (kInt4W4A8StaticChannelSym, "wna16"),
    ):
        with pytest.raises(ConfigError, match=message):
            oracle.select(CONFIG, weight_key=weight_key, activation_key=None, device="cpu")
    with pytest.raises(ConfigError, match="select_int8_moe_backend"):
        select_w4a8_int8_moe_backend(CONFIG, weight_key=kInt8StaticChannelSym, device="cpu")


@pytest.mark.parametrize(("name", "sizes"), [("hidden_size", (200, 128)), ("intermediate_size", (256, 96))])
def test_groups_that_do_not_divide_a_size(name: str, sizes: tuple[int, int]) -> None:
    config = replace(CONFIG, hidden_size=sizes[0], intermediate_size=sizes[1])
    size = min(size for size in sizes if size % 64)
    with pytest.raises(SelectionError, match=f"{name} .*{size}"):
        select_w4a8_int8_moe_backend(config, weight_key=kInt4W4A8StaticGroup64Sym, device="cpu")
    assert select_w4a8_int8_moe_backend(config, weight_key=kInt4W4A8StaticChannelSym, device="cpu").backend == "torch"


@pytest.mark.parametrize("experts", [TorchInt8Experts, TritonW4A8Int8Experts])
def test_what_groups_demand_of_sizes_is_shown(experts: type[FusedMoEExperts]) -> None:
    pairs = describe("int8", "", "", experts)["keys"]
    shown = {
        name: tuple(sizes) for pair in pairs for name, sizes in zip(pair["weights"], pair["multiples"], strict=True)
    }
    assert shown["kInt4W4A8StaticGroup64Sym"] == (64, 64)
    assert shown["kInt4W4A8StaticChannelSym"] == (1, 1)


def tensors(weights: MoEWeights) -> dict[str, Any]:
    return dict(weights.tensors())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation_key", ACTIVATIONS, ids=str)
def test_the_named_functions_make_a_layer(activation_key: QuantKey | None, bias: bool) -> None:
    config = replace(CONFIG, has_bias=bias)
    weights = make_weights(config, kInt8StaticChannelSym, activation_key, seed=0)
    selection = select_int8_moe_backend(config, activation_key=activation_key, device="cpu")
    converted = moe_int8.convert_to_int8_moe_kernel_format(selection, **tensors(weights))
    check_layer(config, weights, moe_int8.make_int8_moe_kernel(selection, converted))


@pytest.mark.parametrize("bias", [False, True])
def test_the_named_functions_make_a_w4a8_layer(bias: bool) -> None:
    config = replace(CONFIG, has_bias=bias)
    weights = make_weights(config, kInt4W4A8StaticGroup128Sym, kInt8DynamicTokenSym, seed=0)
    selection = select_w4a8_int8_moe_backend(config, device="cpu")
    converted = moe_int8.convert_to_w4a8_int8_moe_kernel_format(selection, **tensors(weights))
    check_layer(config, weights, moe_int8.make_w4a8_int8_moe_kernel(selection, converted))


def check_layer(config: FusedMoEConfig, weights: MoEWeights, kernel: Any) -> None:
    inputs = make_inputs(config, 9, seed=1)
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    expected = fused_moe_reference(inputs.x, weights, config, **routed)
    # int32 sums and float32 scales: the output's rounding to bf16, and a code that a hidden value's last bit moves
    assert float((kernel.apply(inputs.x, **routed).double() - expected).norm() / expected.norm()) < 2.0**-8


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("w13_scale", lambda t: t.mT, r"w13_scale .*\[8, 1, 256\]"),
        ("w2_scale", lambda t: t.bfloat16(), "w2_scale .*torch.bfloat16"),
        ("w13", lambda t: t.float(), "w13 .*torch.float32"),
        ("w2", lambda t: t[:, :, :-1], r"w2 .*\[8, 256, 127\]"),
        (
            "w13_input_scale",
            lambda _: torch.ones(8),
            "w13_input_scale .*kInt8Dynamic",
        ),
        (
            "w2_input_zero_point",
            lambda _: torch.zeros(8, dtype=torch.int32),
            "w2_input_zero_point .*kInt8DynamicTokenSym",
        ),
        ("w2_bias", lambda _: torch.zeros(8, 256), "w2_bias .*has_bias"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name: str, change: Any, message: str) -> None:
    weights = tensors(make_weights(CONFIG, kInt8StaticChannelSym, kInt8DynamicTokenSym, seed=0))
    selection = select_int8_moe_backend(CONFIG, device="cpu")
    with pytest.raises(TensorError, match=message):
        moe_int8.convert_to_int8_moe_kernel_format(selection, **{**weights, name: change(weights.get(name))})


def test_the_quant_config_says_what_the_layer_is() -> None:
    scale, one, zero = torch.ones(8, 256, 1), torch.ones(8), torch.zeros(8, dtype=torch.int32)
    make = moe_int8.make_int8_moe_quant_config
    static = {"a1_scale": one, "a2_scale": one}
    for arguments, activation_key in (
        ({}, kInt8DynamicTokenSym),
        (static, kInt8StaticTensorSym),
        ({**static, "a1_zp": zero, "a2_zp": zero}, kInt8StaticTensorAsym),
        ({"weight_only": True}, None),
        ({"weight_key": kInt8StaticChannelSym}, None),
        ({"weight_key": kInt8StaticChannelSym, "activation_key": kInt8DynamicTokenAsym}, kInt8DynamicTokenAsym),
    ):
        quant = make(w1_scale=scale, w2_scale=scale, w1_bias=scale, w2_bias=scale, **arguments)  # type: ignore[arg-type]
        assert (quant.weight_key, quant.activation_key) == (kInt8StaticChannelSym, activation_key)
        assert quant.w1_bias is scale
        assert quant.a1_zp is arguments.get("a1_zp")
    grouped = moe_int8.make_w4a8_int8_moe_quant_config(w1_scale=scale.bfloat16(), w2_scale=scale.bfloat16())
    assert (grouped.weight_key, grouped.activation_key) == (kInt4W4A8StaticGroup128Sym, kInt8DynamicTokenSym)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a1_scale": torch.ones(8)}, "a2_scale"),
        ({"weight_only": True, "a1_scale": torch.ones(8)}, "weight_only"),
        (
            {"per_act_token_quant": False},
            "a1_scale.* a2_scale",
        ),
        ({"activation_key": kInt8DynamicTokenSym}, "weight_key"),
        (
            {"weight_key": kInt8StaticChannelSym, "activation_key": kInt8DynamicTokenSym, "weight_only": True},
            "weight_only .*kInt8DynamicTokenSym",
        ),
        ({"weight_key": kInt4W4A8StaticGroup128Sym}, "w1_scale .*torch.float32"),
        (
            {"a1_zp": torch.zeros(8, dtype=torch.int32), "a2_zp": torch.zeros(8, dtype=torch.int32)},
            "a1_zp",
        ),
    ],
)
def test_arguments_that_contradict_each_other(arguments: dict[str, Any], message: str) -> None:
    scale = torch.ones(8, 256, 1)
    with pytest.raises((ConfigError, TensorError), match=message):
        moe_int8.make_int8_moe_quant_config(**{"w1_scale": scale, "w2_scale": scale, **arguments})
