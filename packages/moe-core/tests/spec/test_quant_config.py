from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from moe_core import (
    ConfigError,
    TensorError,
    fp8_w8a8_moe_quant_config,
    fp8_w8a16_moe_quant_config,
    int8_w8a8_moe_quant_config,
    make_quant_config,
    mxfp8_moe_quant_config,
    wna16_moe_quant_config,
)
from moe_core.spec import quant_config as module
from moe_core.spec import quant_key as qk
from moe_core.spec.roles import scale_shape

S = torch.ones(1)


def test_every_builder_takes_keywords_only() -> None:
    builders = [f for name, f in vars(module).items() if name.endswith("_quant_config") and inspect.isfunction(f)]
    assert len(builders) >= 8
    for builder in builders:
        kinds = {p.kind for p in inspect.signature(builder).parameters.values()}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}, builder.__name__


def test_fp8_keys_follow_the_arguments() -> None:
    block = fp8_w8a8_moe_quant_config(w1_scale=S, w2_scale=S, block_shape=(128, 128))
    assert (block.weight_key, block.activation_key) == (qk.kFp8Static128BlockSym, qk.kFp8Dynamic128Sym)
    assert block.block_shape == (128, 128)
    channel = fp8_w8a8_moe_quant_config(w1_scale=S, w2_scale=S, per_act_token_quant=True, per_out_ch_quant=True)
    assert (channel.weight_key, channel.activation_key) == (qk.kFp8StaticChannelSym, qk.kFp8DynamicTokenSym)
    static = fp8_w8a8_moe_quant_config(w1_scale=S, w2_scale=S, a1_scale=S, a2_scale=S)
    assert (static.weight_key, static.activation_key) == (qk.kFp8StaticTensorSym, qk.kFp8StaticTensorSym)
    assert fp8_w8a16_moe_quant_config(w1_scale=S, w2_scale=S).activation_key is None


FP8_KINDS = [
    (qk.kFp8StaticTensorSym, {}),
    (qk.kFp8StaticChannelSym, {"per_out_ch_quant": True}),
    (qk.kFp8Static128BlockSym, {"block_shape": (128, 128)}),
    (qk.kFp8Static128BlockSym.with_group(128, 64), {"block_shape": (128, 64)}),
    (qk.kFp8Static128BlockE8M0Sym, {"block_shape": (128, 128)}),
    (qk.kMxfp8Static, {"block_shape": (1, 32)}),
]


@pytest.mark.parametrize(("key", "arguments"), FP8_KINDS, ids=[str(key) for key, _ in FP8_KINDS])
def test_weight_only_of_every_kind_carries_biases(key: qk.QuantKey, arguments: dict[str, Any]) -> None:
    shapes = (scale_shape(key, 2, 384, 256, 2), scale_shape(key, 2, 256, 192))
    tensors = {f"w{i}_scale": torch.ones(shape).to(key.scale.dtype) for i, shape in enumerate(shapes, start=1)}
    tensors |= {"w1_bias": torch.ones(2, 384), "w2_bias": torch.ones(2, 256)}
    quant = fp8_w8a16_moe_quant_config(**tensors, **arguments)
    assert (quant.weight_key, quant.activation_key) == (key, None)
    assert quant.w2.key == key
    for name, tensor in tensors.items():
        assert getattr(quant, name) is tensor
    assert quant.a1_scale is None
    assert fp8_w8a8_moe_quant_config(**tensors, **arguments).w1_bias is tensors["w1_bias"]


def test_static_scales_of_each_expert_are_kept() -> None:
    a1, a2 = torch.tensor([0.5, 0.25]), torch.tensor([1.0, 2.0])
    for channel in (False, True):
        quant = fp8_w8a8_moe_quant_config(
            w1_scale=torch.ones(2, 2), w2_scale=torch.ones(2, 1), a1_scale=a1, a2_scale=a2, per_out_ch_quant=channel
        )
        assert quant.a1_scale is a1
        assert quant.a2_scale is a2
        assert quant.activation_key == qk.kFp8StaticTensorSym
        assert quant.weight_key == (qk.kFp8StaticChannelSym if channel else qk.kFp8StaticTensorSym)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a1_scale": S}, "a2_scale"),
        ({"a2_scale": S}, "a2_scale"),
        ({"a1_scale": S, "a2_scale": S, "per_act_token_quant": True}, "a1_scale"),
        ({"a1_scale": S, "a2_scale": S, "block_shape": (128, 128)}, "a1_scale"),
        ({"block_shape": (128, 128), "per_out_ch_quant": True}, "per_out_ch_quant contradict"),
        ({"block_shape": (128, 128), "per_act_token_quant": True}, "per_act_token_quant contradict"),
        ({"w2_scale": S.to(torch.uint8)}, "w2_scale .*torch.uint8"),
        ({"w1_scale": S.bfloat16(), "w2_scale": S.bfloat16()}, "w1_scale .*torch.bfloat16"),
    ],
)
def test_fp8_arguments_that_contradict_each_other(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fp8_w8a8_moe_quant_config(**{"w1_scale": S, "w2_scale": S, **arguments})


def test_mxfp8_is_said_by_the_key_and_needs_its_scale_type() -> None:
    bytes_ = S.to(torch.uint8)
    assert mxfp8_moe_quant_config(w1_scale=bytes_, w2_scale=bytes_).weight_key == qk.kMxfp8Static
    with pytest.raises(ConfigError, match="uint8 e8m0"):
        fp8_w8a8_moe_quant_config(w1_scale=S, w2_scale=S, block_shape=(1, 32))
    for build in (fp8_w8a8_moe_quant_config, fp8_w8a16_moe_quant_config):
        with pytest.raises(ConfigError, match="e8m0"):
            build(w1_scale=bytes_, w2_scale=bytes_)
        blocks = build(w1_scale=bytes_, w2_scale=bytes_, block_shape=(128, 128))
        assert blocks.weight_key == qk.kFp8Static128BlockE8M0Sym


def test_int8_activations_follow_the_arguments() -> None:
    scales = {"w1_scale": S, "w2_scale": S}
    zero = torch.zeros(1, dtype=torch.int32)
    assert int8_w8a8_moe_quant_config(**scales).activation_key == qk.kInt8DynamicTokenSym
    static = {**scales, "a1_scale": S, "a2_scale": S}
    assert int8_w8a8_moe_quant_config(**static).activation_key == qk.kInt8StaticTensorSym
    shifted = int8_w8a8_moe_quant_config(**static, a1_zp=zero, a2_zp=zero)
    assert shifted.activation_key == qk.kInt8StaticTensorAsym
    assert shifted.a1_zp is zero
    assert shifted.a2_zp is zero
    for arguments, message in (
        ({**static, "a1_zp": zero}, "a2_zp"),
        ({**static, "a2_zp": zero}, "a2_zp"),
        ({**scales, "a1_zp": zero, "a2_zp": zero}, "a1_zp"),
    ):
        with pytest.raises(ConfigError, match=message):
            int8_w8a8_moe_quant_config(**arguments)


def test_biases_and_scales_land_where_they_belong() -> None:
    tensors = {name: torch.tensor([float(i)]) for i, name in enumerate(("w1_scale", "w2_scale", "w1_bias", "w2_bias"))}
    quant = fp8_w8a16_moe_quant_config(**tensors)
    for name, tensor in tensors.items():
        assert getattr(quant, name) is tensor
    assert quant.has_bias
    assert dict(quant.tensors()).keys() == tensors.keys()
    assert quant.w1_scale2 is None
    assert quant.weight_scales == (tensors["w1_scale"], tensors["w2_scale"])


def test_weights_without_scales() -> None:
    with pytest.raises(TensorError, match="w1_scale.* w2_scale"):
        _ = make_quant_config(weight_key=None, activation_key=None).weight_scales


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_key": qk.kFp8StaticTensorSym, "activation_key": None, "w1_scale": S}, "w2_scale"),
        ({"weight_key": None, "activation_key": None, "w1_scale": S}, "w1_scale"),
        (
            {"weight_key": qk.kFp8StaticTensorSym, "activation_key": None, "w1_scale": S, "w2_scale": S, "w1_zp": S},
            "w1_zp",
        ),
        (
            {
                "weight_key": qk.kInt4StaticAsym,
                "activation_key": None,
                "w1_scale": S.bfloat16(),
                "w2_scale": S.bfloat16(),
                "canonical": True,
            },
            "w1_zp",
        ),
        (
            {
                "weight_key": qk.kFp8StaticTensorSym,
                "activation_key": qk.kFp8StaticTensorSym,
                "w1_scale": S,
                "w2_scale": S,
            },
            "a1_scale",
        ),
        (
            {
                "weight_key": qk.kFp8StaticTensorSym,
                "activation_key": qk.kFp8DynamicTokenSym,
                "w1_scale": S,
                "w2_scale": S,
                "a1_scale": S,
            },
            "a1_scale",
        ),
    ],
)
def test_what_contradicts_the_keys_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_quant_config(**arguments)  # type: ignore[arg-type]


def test_int8_needs_a_kind_of_activation() -> None:
    with pytest.raises(ConfigError, match="dynamic"):
        int8_w8a8_moe_quant_config(w1_scale=S, w2_scale=S, per_act_token_quant=False)


def test_wna16_key_says_group_and_zero_points() -> None:
    scale = torch.ones(1, dtype=torch.bfloat16)
    assert (
        wna16_moe_quant_config(num_bits=4, group_size=128, w1_scale=scale, w2_scale=scale).weight_key == qk.kInt4Static
    )
    zp = torch.ones(1, dtype=torch.uint8)
    asym = wna16_moe_quant_config(num_bits=4, group_size=32, w1_scale=scale, w2_scale=scale, w1_zp=zp, w2_zp=zp)
    assert asym.weight_key == qk.kInt4Static32Asym
    with pytest.raises(ConfigError, match="num_bits .*3"):
        wna16_moe_quant_config(num_bits=3, group_size=32, w1_scale=scale, w2_scale=scale)
