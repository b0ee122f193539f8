from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import FusedMoEConfig, KernelWeights, MoEWeights, TensorError, make_quant_config
from moe_core import quant_key as qk
from moe_core.weights import check_values, scale_shape

CONFIG = FusedMoEConfig(num_experts=3, top_k=1, hidden_size=256, intermediate_size=192)


def block_weights() -> MoEWeights:
    return MoEWeights(
        weight_key=qk.kFp8Static128BlockSym,
        activation_key=qk.kFp8Dynamic128Sym,
        w13=torch.ones(3, 384, 256).to(torch.float8_e4m3fn),
        w2=torch.ones(3, 256, 192).to(torch.float8_e4m3fn),
        w13_scale=torch.ones(3, 4, 2),
        w2_scale=torch.ones(3, 2, 2),
    )


@pytest.mark.parametrize(
    ("key", "parts", "expected"),
    [
        (qk.kFp8Static128BlockSym, 2, (3, 4, 2)),  # 192 rows are two blocks in each half
        (qk.kFp8Static128BlockSym, 1, (3, 3, 2)),
        (qk.kFp8StaticChannelSym, 2, (3, 384, 1)),
        (qk.kFp8StaticTensorSym, 2, (3, 2)),
        (qk.kMxfp8Static, 2, (3, 384, 8)),
        (qk.kInt4Static, 2, (3, 384, 2)),
    ],
)
def test_scale_shapes(key: qk.QuantKey, parts: int, expected: tuple[int, ...]) -> None:
    assert scale_shape(key, 3, 384, 256, parts) == expected


def test_good_weights_pass() -> None:
    block_weights().validate(CONFIG, values=True)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "w13",
            torch.ones(3, 383, 256).to(torch.float8_e4m3fn),
            r"w13 has shape \[3, 383, 256\], expected \[3, 384, 256\]",
        ),
        ("w2", torch.ones(3, 256, 192), "w2 has dtype torch.float32, expected torch.float8_e4m3fn"),
        ("w13_scale", torch.ones(3, 3, 2), r"w13_scale has shape \[3, 3, 2\], expected \[3, 4, 2\]"),
        ("w2_scale", torch.ones(3, 2, 2, dtype=torch.float16), "w2_scale has dtype torch.float16"),
        ("w2_scale", None, r"w2_scale is missing, expected \[3, 2, 2\]"),
        ("w13_zero_point", torch.zeros(3, 4, 2), "w13_zero_point is given"),
        ("w2_input_scale", torch.ones(3), "w2_input_scale is given, but the activation key is kFp8Dynamic128Sym"),
        ("w2_g_idx", torch.zeros(3, 192), "w2_g_idx is given, but the weight key is kFp8Static128BlockSym"),
        ("w2_scale", torch.ones(3, 2, 2, device="meta"), "on several devices: cpu, meta"),
        ("w13_bias", torch.zeros(3, 384), "w13_bias is given, but config.has_bias=False"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name: str, tensor: torch.Tensor | None, message: str) -> None:
    with pytest.raises(TensorError, match=message):
        replace(block_weights(), **{name: tensor}).validate(CONFIG)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_bad_scale_values_are_found_and_placed(bad: float) -> None:
    weights = block_weights()
    assert weights.w13_scale is not None
    weights.w13_scale[2, 3, 1] = bad
    with pytest.raises(TensorError, match=r"w13_scale has 1 NaN, Inf or negative value of 24, first at \[2, 3, 1\]"):
        weights.validate(CONFIG, values=True)


def test_nan_codes_are_found() -> None:
    codes = torch.zeros(4, dtype=torch.uint8)
    codes[2] = 0xFF
    with pytest.raises(TensorError, match=r"w has 1 NaN value of 4, first at \[2\]"):
        check_values("w", codes.view(torch.float8_e4m3fn), scale=False)
    with pytest.raises(TensorError, match="e8m0 code 255"):
        check_values("s", codes, scale=True)
    check_values("w", codes, scale=False)  # packed weights may hold any byte


def kernel_weights(value: float, rows: int = 2) -> KernelWeights:
    quant = make_quant_config(
        weight_key=qk.kFp8StaticTensorSym,
        activation_key=None,
        w1_scale=torch.full((1, 2), value),
        w2_scale=torch.full((1, 1), value),
    )
    return KernelWeights(w13=torch.full((1, rows, 4), value), w2=torch.full((1, 4, 1), value), quant_config=quant)


def test_copy_keeps_the_storage() -> None:
    held, new = kernel_weights(1.0), kernel_weights(2.0)
    pointers = {name: t.data_ptr() for name, t in held.tensors()}
    held.copy_(new)
    assert {name: t.data_ptr() for name, t in held.tensors()} == pointers
    assert all(bool((t == 2).all()) for _, t in held.tensors())


def test_copy_of_what_does_not_fit_writes_nothing() -> None:
    held = kernel_weights(1.0)
    with pytest.raises(TensorError, match=r"w13 has shape \[1, 3, 4\], expected \[1, 2, 4\]"):
        held.copy_(kernel_weights(2.0, rows=3))
    with pytest.raises(TensorError, match="new weights hold"):
        held.copy_(replace(kernel_weights(2.0), extra={"locks": torch.zeros(1)}))
    assert all(bool((t == 1).all()) for _, t in held.tensors())
