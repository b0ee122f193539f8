"""The oracle's table and the functions that engines know it by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import moe_wna16
import pytest
import torch
from moe_core import (
    ConfigError,
    Environment,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    MoEWeights,
    Oracle,
    QuantKey,
    SelectionError,
    TensorError,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kInt4Static,
    kInt4Static32,
    kInt4StaticAsym,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTokenSym,
    kInt8Static,
    kInt8StaticAsym,
    kInt8StaticChannelSym,
)
from moe_core.reference.tolerance import expected_output
from moe_core.testing.data import make_inputs, make_weights
from moe_wna16 import WNA16MoEBackend, select_wna16_moe_backend
from moe_wna16.experts.torch import TorchWNA16Experts
from moe_wna16.keys import BASES, every_key, in_order
from moe_wna16.scheme import SCHEME

CONFIG = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=256, intermediate_size=128)
NOTHING = Environment({})
PERMUTED = replace(kInt4StaticAsym.with_group(1, 32), permuted=True)
PRE_SCALED = replace(kInt4Static, pre_scaled=True)
#: one key for everything that a key can say
KEYS: tuple[tuple[QuantKey, QuantKey | None], ...] = (
    (kInt4Static, None),
    (kInt4Static32.with_scale_dtype(torch.float16), None),
    (kInt4StaticAsym.with_group(1, 64), None),
    (kInt8Static.with_group(1, -1), None),
    (kInt8StaticAsym.with_scale_dtype(torch.float32), None),
    (PERMUTED, None),
    (PRE_SCALED, None),
    (replace(kInt8StaticAsym, permuted=True, pre_scaled=True), None),
    (kInt4Static, kFp8DynamicTokenSym),
    (PRE_SCALED.with_group(1, -1), kFp8DynamicTokenSym),
)


@pytest.mark.parametrize("base", BASES, ids=str)
def test_every_device_has_torch(base: QuantKey) -> None:
    """Without any library, in both activation formats."""
    for device in ("cpu", "sm75", "sm90", "gfx942"):
        for layout in FusedMoEActivationFormat:
            config = replace(CONFIG, activation_format=layout, is_lora_enabled=True)
            for key in every_key(base).expand():
                selection = select_wna16_moe_backend(
                    config, weight_key=key, moe_backend="torch", device=device, environment=NOTHING
                )
                assert selection.experts is TorchWNA16Experts


def test_a_cpu_takes_torch() -> None:
    for key in in_order(kInt4Static).expand():
        selection = select_wna16_moe_backend(
            CONFIG, weight_key=key, activation_key=kFp8DynamicTokenSym, device="cpu", environment=NOTHING
        )
        assert selection.experts is TorchWNA16Experts


def test_the_default_is_int4_in_groups_of_128() -> None:
    selection = select_wna16_moe_backend(CONFIG, device="cpu")
    assert (selection.weight_key, selection.activation_key) == (kInt4Static, None)


def test_a_named_backend_is_never_replaced() -> None:
    key = kInt4Static.with_group(1, 96)
    with pytest.raises(SelectionError, match="'torch'.*replaced"):
        select_wna16_moe_backend(CONFIG, weight_key=key, moe_backend=WNA16MoEBackend.TORCH, device="cpu")
    with pytest.raises(ConfigError, match="backend 'none'"):
        select_wna16_moe_backend(CONFIG, moe_backend="none", device="cpu")


@pytest.mark.parametrize(
    ("weight_key", "activation_key", "message"),
    [
        (None, None, "16-bit weights"),
        (kInt8StaticChannelSym, None, "kInt8StaticChannelSym"),
        (kInt4W4A8StaticGroup128Sym, None, "kInt4W4A8StaticGroup128Sym"),
        (kInt4Static.with_group(128, 128), None, "groups"),
        (replace(kInt4Static, symmetric=False), None, "uint4b8"),
        (replace(kInt8StaticAsym, symmetric=True), None, "uint8"),
        (kInt4Static, kInt8DynamicTokenSym, "kInt8DynamicTokenSym"),
        (kInt4Static, kFp8Dynamic128Sym, "with kFp8Dynamic128Sym"),
        (kInt4StaticAsym, kFp8DynamicTokenSym, "kFp8DynamicTokenSym"),
        (kInt8Static, kFp8DynamicTokenSym, "kInt8Static"),
    ],
)
def test_what_the_scheme_does_not_mean(
    weight_key: QuantKey | None, activation_key: QuantKey | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Oracle(SCHEME).select(CONFIG, weight_key=weight_key, activation_key=activation_key, device="cpu")


def tensors(weights: MoEWeights) -> dict[str, Any]:
    return dict(weights.tensors())


def quant_tensors(weights: MoEWeights) -> dict[str, Any]:
    """What goes with the weights, as quant configs call it."""
    found = {}
    for name, tensor in tensors(weights).items():
        matrix, _, suffix = name.partition("_")
        if suffix:
            found[matrix.replace("w13", "w1") + "_" + suffix.replace("zero_point", "zp")] = tensor
    return found


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("weight_key", "activation_key"), KEYS, ids=str)
def test_the_named_functions_make_a_layer(weight_key: QuantKey, activation_key: QuantKey | None, gated: bool) -> None:
    config = replace(CONFIG, has_bias=True, activation=CONFIG.activation if gated else "relu2_no_mul")
    weights = make_weights(config, weight_key, activation_key, seed=0)
    selection = select_wna16_moe_backend(
        config, weight_key=weight_key, activation_key=activation_key, moe_backend="torch", device="cpu"
    )
    converted = moe_wna16.convert_to_wna16_moe_kernel_format(selection, **tensors(weights))
    kernel = moe_wna16.make_wna16_moe_kernel(selection, converted)
    inputs = make_inputs(config, 9, seed=1)
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    found = kernel.apply(inputs.x, **routed)
    expected_output(inputs.x, weights, config, **routed).compare(found, str(weight_key))
    quant = moe_wna16.make_wna16_moe_quant_config(
        weight_key=weight_key, activation_key=activation_key, **quant_tensors(weights)
    )
    assert (quant.weight_key, quant.activation_key) == (weight_key, activation_key)
    named = dict(quant.tensors())
    given = {n.replace("_zp", "_zero_point"): t for n, t in quant_tensors(weights).items()}
    assert named.keys() == given.keys()
    assert all(named[name] is tensor for name, tensor in given.items())


@pytest.mark.parametrize(("weight_key", "activation_key"), [pair for pair in KEYS if pair[1] is None], ids=str)
def test_tensors_say_the_key(weight_key: QuantKey, activation_key: None) -> None:
    weights = make_weights(CONFIG, weight_key, activation_key, seed=0)
    quant = moe_wna16.make_wna16_moe_quant_config(
        num_bits=weight_key.dtype.bits, group_size=weight_key.group_size, **quant_tensors(weights)
    )
    assert quant.weight_key == weight_key


def last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :-1]


def out_of_range(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[3, 7] = 99
    return changed


#: (key, tensor, what is wrong with it, what must be said)
BAD: list[tuple[QuantKey, str, Callable[[Any], Any], str]] = [
    (kInt4Static32, "w13_scale", last, r"w13_scale has shape \[8, 256, 7\], expected \[8, 256, 8\]"),
    # w2 in groups of 64 where w13 is in groups of 32
    (
        kInt4Static32,
        "w2_scale",
        lambda t: t[..., ::2],
        r"w2_scale has shape \[8, 256, 2\], expected \[8, 256, 4\]",
    ),
    (kInt4Static, "w2_scale", torch.Tensor.float, "w2_scale has dtype torch.float32, expected torch.bfloat16"),
    (
        kInt4StaticAsym,
        "w13_zero_point",
        last,
        r"w13_zero_point has shape \[8, 256, 1\], expected \[8, 256, 2\]",
    ),
    (
        kInt4StaticAsym,
        "w2_zero_point",
        torch.Tensor.float,
        "w2_zero_point has dtype torch.float32, expected torch.uint8 or torch.int32",
    ),
    (kInt4StaticAsym, "w2_zero_point", lambda _: None, "w2_zero_point is missing"),
    (kInt4Static, "w13_zero_point", lambda _: torch.zeros(8, 256, 2), "w13_zero_point is given"),
    (PERMUTED, "w13_g_idx", torch.Tensor.float, "w13_g_idx has dtype torch.float32, expected torch.int32"),
    (PERMUTED, "w13_g_idx", out_of_range, r"w13_g_idx is 99 at \[3, 7\], expected 0 to 7: w13_scale has 8 groups"),
    (PERMUTED, "w2_g_idx", lambda t: t - 9, r"w2_g_idx is -\d at \[0, 0\], expected 0 to 7: w2_scale has 8 groups"),
    (PERMUTED, "w2_g_idx", last, r"w2_g_idx has shape \[8, 127\], expected \[8, 128\]"),
    (PERMUTED, "w2_g_idx", lambda _: None, "w2_g_idx is missing, but the weight key is"),
    (kInt4Static, "w2_g_idx", lambda _: torch.zeros(8, 128).int(), "w2_g_idx is given, but the weight key is kInt4S"),
    (PRE_SCALED, "w13_pre_scale", last, r"w13_pre_scale has shape \[8, 255\], expected \[8, 256\]"),
    (PRE_SCALED, "w2_pre_scale", torch.Tensor.half, "w2_pre_scale has dtype torch.float16, expected torch.float32"),
    (kInt4Static, "w13", torch.Tensor.int, "w13 has dtype torch.int32, expected torch.uint8"),
    (kInt4Static, "w13", last, r"w13 has shape \[8, 256, 127\], expected \[8, 256, 128\]"),
    (kInt8Static, "w2", lambda t: t.view(torch.int8), "w2 has dtype torch.int8, expected torch.uint8"),
    (kInt4Static, "w2_bias", lambda _: torch.zeros(8, 256), "w2_bias is given, but config.has_bias=False"),
]


@pytest.mark.parametrize(("key", "name", "change", "message"), BAD)
def test_tensors_that_do_not_fit_are_named(
    key: QuantKey, name: str, change: Callable[[Any], Any], message: str
) -> None:
    weights = tensors(make_weights(CONFIG, key, None, seed=0))
    selection = select_wna16_moe_backend(CONFIG, weight_key=key, moe_backend="torch", device="cpu")
    with pytest.raises(TensorError, match=message):
        moe_wna16.convert_to_wna16_moe_kernel_format(selection, **{**weights, name: change(weights.get(name))})


@pytest.mark.parametrize(
    ("key", "changes", "message"),
    [
        (kInt4Static32, {"w1_scale": last}, "w1_scale .*7"),
        (
            kInt4Static32,
            {"w2_scale": lambda t: t[..., :2]},
            "w2_scale .*2",
        ),
        (kInt4Static, {"w2_scale": lambda t: t[:7]}, r"w2_scale .*\[7, 256, 1\]"),
        (kInt4StaticAsym, {"w2_zp": lambda t: t[:, 1:]}, r"w2_zp .*\[8, 255, 1\]"),
        (kInt4StaticAsym, {"w1_zp": torch.Tensor.float}, "w1_zp .*torch.float32"),
        (PERMUTED, {"w1_g_idx": torch.Tensor.long}, "w1_g_idx .*torch.int64"),
        (PERMUTED, {"w2_g_idx": lambda t: t[0]}, r"w2_g_idx .*\[128\]"),
        (PRE_SCALED, {"w1_pre_scale": torch.Tensor.half}, "w1_pre_scale .*torch.float16"),
        # contradictions between keys and tensors
        (kInt4Static, {"w1_scale": torch.Tensor.half}, "w1_scale .*torch.float16"),
        (kInt4StaticAsym, {"w2_zp": lambda _: None}, "w2_zp"),
        (PERMUTED, {"w2_g_idx": lambda _: None}, "w2_g_idx"),
        (PRE_SCALED, {"w2_pre_scale": lambda _: None}, "w2_pre_scale"),
        (kInt4Static, {"w1_zp": lambda _: torch.zeros(8)}, "w1_zp"),
        (kInt4Static, {"w1_g_idx": lambda _: torch.zeros(8)}, "w1_g_idx"),
        (kInt4Static, {"w1_pre_scale": lambda _: torch.zeros(8)}, "w1_pre_scale"),
    ],
)
def test_a_quant_config_of_tensors_that_do_not_fit(
    key: QuantKey, changes: dict[str, Callable[[Any], Any]], message: str
) -> None:
    given = quant_tensors(make_weights(CONFIG, key, None, seed=0))
    for name, change in changes.items():
        given[name] = change(given.get(name))
    with pytest.raises((ConfigError, TensorError), match=message):
        moe_wna16.make_wna16_moe_quant_config(weight_key=key, **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "weight_key"),
        ({"num_bits": 4}, "weight_key"),
        ({"num_bits": 2, "group_size": 128}, "num_bits .*2"),
        ({"num_bits": 4, "group_size": 0}, "group_size .*0"),
        ({"num_bits": 4, "group_size": 32}, "w1_scale .*2"),
        (
            {"num_bits": 4, "group_size": 128, "activation_key": kFp8DynamicTokenSym},
            "activation_key",
        ),
        ({"weight_key": kInt4Static, "num_bits": 4}, "num_bits.* group_size"),
        (
            {"num_bits": 4, "group_size": 128, "w2_zp": torch.zeros(8, 256, 1, dtype=torch.uint8)},
            "w2_zp",
        ),
    ],
)
def test_arguments_that_contradict_each_other(arguments: dict[str, Any], message: str) -> None:
    scales = {
        "w1_scale": torch.ones(8, 256, 2, dtype=torch.bfloat16),
        "w2_scale": torch.ones(8, 256, 1, dtype=torch.bfloat16),
    }
    with pytest.raises((ConfigError, TensorError), match=message):
        moe_wna16.make_wna16_moe_quant_config(**{**scales, **arguments})
