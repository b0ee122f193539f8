from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import FusedMoEConfig, KernelWeights, MoEWeights, TensorError, make_quant_config
from moe_core.spec import quant_key as qk
from moe_core.spec.roles import scale_shape
from moe_core.spec.weights import check_values

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


def test_both_scales_or_an_error() -> None:
    weights = block_weights()
    w13_scale, w2_scale = weights.weight_scales
    assert w13_scale is weights.w13_scale
    assert w2_scale is weights.w2_scale
    for name in ("w13_scale", "w2_scale"):
        with pytest.raises(TensorError, match="kFp8Static128BlockSym"):
            _ = replace(weights, **{name: None}).weight_scales


def test_detached_weights_keep_the_memory_of_parameters_whose_data_changes() -> None:
    plain = block_weights()
    parameter = torch.nn.Parameter(plain.w2, requires_grad=False)
    weights = replace(plain, w2=parameter).detached()
    assert type(weights.w2) is torch.Tensor
    assert weights.w2.data_ptr() == parameter.data_ptr()
    parameter.data = torch.zeros(3, 256, 192).to(torch.float8_e4m3fn)
    assert bool((weights.w2.float() == 1).all())
    assert plain.detached() is plain


def test_good_weights_pass() -> None:
    block_weights().validate(CONFIG, values=True)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "w13",
            torch.ones(3, 383, 256).to(torch.float8_e4m3fn),
            r"w13 .*\[3, 383, 256\]",
        ),
        ("w2", torch.ones(3, 256, 192), "w2 .*torch.float32"),
        ("w13_scale", torch.ones(3, 3, 2), r"w13_scale .*\[3, 3, 2\]"),
        ("w2_scale", torch.ones(3, 2, 2, dtype=torch.float16), "w2_scale .*torch.float16"),
        ("w2_scale", None, "w2_scale"),
        ("w13_zero_point", torch.zeros(3, 4, 2), "w13_zero_point"),
        ("w2_input_scale", torch.ones(3), "w2_input_scale .*kFp8Dynamic128Sym"),
        ("w2_g_idx", torch.zeros(3, 192), "w2_g_idx .*kFp8Static128BlockSym"),
        ("w2_scale", torch.ones(3, 2, 2, device="meta"), "w13_scale .*w2_scale"),
        ("w13_bias", torch.zeros(3, 384), "w13_bias .*has_bias"),
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
    with pytest.raises(TensorError, match=r"w13_scale .*\[2, 3, 1\]"):
        weights.validate(CONFIG, values=True)


def tensor_weights(**changed: torch.Tensor) -> MoEWeights:
    given = {
        "w13_scale": torch.full((3, 2), 0.5),
        "w2_scale": torch.full((3, 1), 0.5),
        "w13_input_scale": torch.ones(3),
        "w2_input_scale": torch.ones(3),
    }
    keys = {"weight_key": qk.kFp8StaticTensorSym, "activation_key": qk.kFp8StaticTensorSym}
    return replace(block_weights(), **keys, **{**given, **changed})  # type: ignore[arg-type]


def test_a_scale_of_a_whole_matrix_is_not_zero() -> None:
    tensor_weights().validate(CONFIG, values=True)
    for name, at in (("w13_scale", (1, 1)), ("w2_scale", (2, 0)), ("w13_input_scale", (0,)), ("w2_input_scale", (2,))):
        weights = tensor_weights()
        getattr(weights, name)[at] = 0.0
        weights.validate(CONFIG)
        with pytest.raises(TensorError, match=rf"{name} has"):
            weights.validate(CONFIG, values=True)
    # a block of zeros may have a scale of zero
    weights = block_weights()
    assert weights.w13_scale is not None
    weights.w13_scale[0, 0, 0] = 0.0
    weights.validate(CONFIG, values=True)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("w13_scale", torch.ones(3, 1), r"w13_scale .*\[3, 1\]"),
        ("w2_scale", torch.ones(3), r"w2_scale .*\[3\]"),
        ("w13_input_scale", torch.ones(1), r"w13_input_scale .*\[1\]"),
        ("w2_input_scale", torch.ones(3).bfloat16(), "w2_input_scale .*torch.bfloat16"),
    ],
)
def test_scales_per_tensor_have_one_value_per_expert_and_part(name: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(TensorError, match=message):
        tensor_weights(**{name: tensor}).validate(CONFIG)


@pytest.mark.parametrize(
    ("key", "grid13", "grid2"),
    [
        (qk.kFp8StaticChannelSym, (384, 1), (256, 1)),
        (qk.kMxfp8Static, (384, 8), (256, 6)),
        (qk.kFp8Static128BlockSym.with_group(64, 128), (6, 2), (4, 2)),
        (qk.kFp8Static128BlockE8M0Sym, (4, 2), (2, 2)),
    ],
)
def test_scale_grids_that_do_not_fit(key: qk.QuantKey, grid13: tuple[int, int], grid2: tuple[int, int]) -> None:
    def scale(grid: tuple[int, int]) -> torch.Tensor:
        return torch.ones(3, *grid).to(key.scale.dtype)

    good = replace(block_weights(), weight_key=key, activation_key=None, w13_scale=scale(grid13), w2_scale=scale(grid2))
    good.validate(CONFIG, values=True)
    for name, (rows, cols) in (("w13_scale", grid13), ("w2_scale", grid2)):
        for wrong in ((rows - 1, cols), (rows + 1, cols), (rows, cols + 1)):
            with pytest.raises(TensorError, match=rf"{name} .*\[3, {wrong[0]}, {wrong[1]}\]"):
                replace(good, **{name: scale(wrong)}).validate(CONFIG)
        other = torch.uint8 if key.scale.dtype is torch.float32 else torch.float32
        with pytest.raises(TensorError, match=f"{name} has dtype {other}"):
            replace(good, **{name: scale((rows, cols)).to(other)}).validate(CONFIG)
    if key.scale.dtype is torch.uint8:
        assert good.w2_scale is not None
        good.w2_scale[1, 0, 1] = 255
        with pytest.raises(TensorError, match=r"w2_scale .*\[1, 0, 1\]"):
            good.validate(CONFIG, values=True)


def test_nan_codes_and_biases_are_found_in_a_layer() -> None:
    weights = replace(block_weights(), w13_bias=torch.zeros(3, 384), w2_bias=torch.zeros(3, 256))
    config = replace(CONFIG, has_bias=True)
    weights.validate(config, values=True)
    assert weights.w2_bias is not None
    for wrong in (torch.zeros(3, 255), torch.zeros(256)):
        with pytest.raises(TensorError, match=r"w2_bias .*\[3, 256\]"):
            replace(weights, w2_bias=wrong).validate(config)
    with pytest.raises(TensorError, match="w2_bias .*torch.float8_e4m3fn"):
        replace(weights, w2_bias=weights.w2_bias.to(torch.float8_e4m3fn)).validate(config)
    weights.w2_bias[0, 7] = float("inf")
    with pytest.raises(TensorError, match=r"w2_bias .*\[0, 7\]"):
        weights.validate(config, values=True)
    weights = block_weights()
    weights.w13.view(torch.uint8)[1, 300, 5] = 0x7F
    with pytest.raises(TensorError, match=r"w13 .*\[1, 300, 5\]"):
        weights.validate(CONFIG, values=True)


def test_column_groups_out_of_range_are_found() -> None:
    key = replace(qk.kInt4Static.with_group(1, 64), packing=None, permuted=True)
    weights = MoEWeights(
        weight_key=key,
        activation_key=None,
        w13=torch.zeros(3, 384, 256, dtype=torch.uint8),
        w2=torch.zeros(3, 256, 192, dtype=torch.uint8),
        w13_scale=torch.ones(3, 384, 4, dtype=torch.bfloat16),
        w2_scale=torch.ones(3, 256, 3, dtype=torch.bfloat16),
        w13_g_idx=(torch.arange(256) // 64).int().expand(3, 256).clone(),
        w2_g_idx=(torch.arange(192) // 64).int().expand(3, 192).clone(),
    )
    weights.validate(CONFIG, values=True)
    assert weights.w2_g_idx is not None
    weights.w2_g_idx[2, 10] = 3
    # always, since kernels would read memory behind the scales
    with pytest.raises(TensorError, match=r"w2_g_idx .*3 at \[2, 10\]"):
        weights.validate(CONFIG)
    # a part of a row that ranks share, in groups of the whole row
    replace(weights, w2_scale=torch.ones(3, 256, 6, dtype=torch.bfloat16)).validate(CONFIG, values=True)
    with pytest.raises(TensorError, match="w2_g_idx .*torch.int64"):
        replace(weights, w2_g_idx=weights.w2_g_idx.long()).validate(CONFIG)


def test_one_scale_per_row_leaves_no_groups_to_permute() -> None:
    one = [torch.zeros(3, columns, dtype=torch.int32) for columns in (256, 192)]
    weights = MoEWeights(
        weight_key=replace(qk.kInt4Static.with_group(1, -1), permuted=True),
        activation_key=None,
        w13=torch.zeros(3, 384, 128, dtype=torch.uint8),
        w2=torch.zeros(3, 256, 96, dtype=torch.uint8),
        w13_scale=torch.ones(3, 384, 1, dtype=torch.bfloat16),
        w2_scale=torch.ones(3, 256, 1, dtype=torch.bfloat16),
        w13_g_idx=one[0],
        w2_g_idx=one[1],
    )
    weights.validate(CONFIG)
    wrong = replace(weights, w2_scale=torch.ones(3, 256, 2, dtype=torch.bfloat16))
    with pytest.raises(TensorError, match=r"w2_scale .*\[3, 256, 2\]"):
        wrong.validate(CONFIG)


def test_zero_points_and_factors_of_inputs() -> None:
    key = replace(qk.kInt4StaticAsym.with_group(1, 64), pre_scaled=True)
    weights = MoEWeights(
        weight_key=key,
        activation_key=None,
        w13=torch.zeros(3, 384, 128, dtype=torch.uint8),
        w2=torch.zeros(3, 256, 96, dtype=torch.uint8),
        w13_scale=torch.ones(3, 384, 4, dtype=torch.bfloat16),
        w2_scale=torch.ones(3, 256, 3, dtype=torch.bfloat16),
        # GPTQ stores zero points less one, so 16 occurs
        w13_zero_point=torch.full((3, 384, 4), 16, dtype=torch.uint8),
        w2_zero_point=torch.zeros(3, 256, 3, dtype=torch.int32),
        w13_pre_scale=torch.full((3, 256), -0.5),
        w2_pre_scale=torch.zeros(3, 192),
    )
    weights.validate(CONFIG, values=True)
    assert "w2_pre_scale" in dict(weights.tensors())
    zero_point = torch.zeros(3, 256, 3, dtype=torch.int32)
    factors = torch.ones(3, 256)
    zero_point[1, 2, 0], factors[2, 7] = 17, float("nan")
    for changed, message in (
        ({"w2_zero_point": zero_point}, r"w2_zero_point .*17 at \[1, 2, 0\]"),
        ({"w2_zero_point": zero_point[:, :, :2]}, r"w2_zero_point .*\[3, 256, 2\]"),
        ({"w2_zero_point": zero_point.float()}, "w2_zero_point .*torch.float32"),
        ({"w13_pre_scale": factors}, r"w13_pre_scale .*\[2, 7\]"),
        ({"w13_pre_scale": factors.bfloat16()}, "w13_pre_scale .*torch.bfloat16"),
        ({"w2_pre_scale": factors}, r"w2_pre_scale .*\[3, 256\]"),
        ({"w2_pre_scale": None}, "w2_pre_scale .*uint4"),
        ({"weight_key": replace(key, pre_scaled=False)}, "w13_pre_scale"),
    ):
        with pytest.raises(TensorError, match=message):
            replace(weights, **changed).validate(CONFIG, values=True)


def int8_weights(activation_key: qk.QuantKey, **changed: torch.Tensor) -> MoEWeights:
    given = {
        "w13": torch.full((3, 384, 256), -128, dtype=torch.int8),  # symmetric, and allowed all the same
        "w2": torch.ones(3, 256, 192, dtype=torch.int8),
        "w13_scale": torch.ones(3, 384, 1),
        "w2_scale": torch.ones(3, 256, 1),
        **changed,
    }
    return MoEWeights(weight_key=qk.kInt8StaticChannelSym, activation_key=activation_key, **given)


def test_static_zero_points_come_with_their_key() -> None:
    scales = {"w13_input_scale": torch.ones(3), "w2_input_scale": torch.ones(3)}
    zero = {name: torch.zeros(3, dtype=torch.int32) for name in ("w13_input_zero_point", "w2_input_zero_point")}
    int8_weights(qk.kInt8StaticTensorAsym, **scales, **zero).validate(CONFIG, values=True)
    int8_weights(qk.kInt8DynamicTokenAsym).validate(CONFIG, values=True)
    for key, given, message in (
        (qk.kInt8StaticTensorAsym, scales, "w13_input_zero_point .*kInt8Static"),
        (qk.kInt8StaticTensorSym, {**scales, **zero}, "w13_input_zero_point .*kInt"),
        (qk.kInt8DynamicTokenAsym, zero, "w13_input_zero_point"),
        (
            qk.kInt8StaticTensorAsym,
            {**scales, **zero, "w2_input_zero_point": torch.zeros(1, dtype=torch.int32)},
            r"w2_input_zero_point .*\[1\]",
        ),
        (
            qk.kInt8StaticTensorAsym,
            {**scales, **zero, "w2_input_zero_point": torch.zeros(3)},
            "w2_input_zero_point .*torch.float32",
        ),
    ):
        with pytest.raises(TensorError, match=message):
            int8_weights(key, **given).validate(CONFIG)
    far = torch.tensor([0, 128, 0], dtype=torch.int32)
    weights = int8_weights(qk.kInt8StaticTensorAsym, **scales, **{**zero, "w2_input_zero_point": far})
    with pytest.raises(TensorError, match=r"w2_input_zero_point .*128 at \[1\]"):
        weights.validate(CONFIG, values=True)


def test_scales_of_unsigned_codes_may_be_negative() -> None:
    weights = MoEWeights(
        weight_key=qk.kInt8Static,
        activation_key=None,
        w13=torch.zeros(3, 384, 256, dtype=torch.uint8),
        w2=torch.zeros(3, 256, 192, dtype=torch.uint8),
        w13_scale=torch.full((3, 384, 2), -1.0, dtype=torch.bfloat16),
        w2_scale=torch.ones(3, 256, 2, dtype=torch.bfloat16),
    )
    weights.validate(CONFIG, values=True)
    assert weights.w2_scale is not None
    weights.w2_scale[2, 1, 0] = float("nan")
    with pytest.raises(TensorError, match=r"w2_scale .*\[2, 1, 0\]"):
        weights.validate(CONFIG, values=True)


def test_codes_of_four_bits_in_bytes_are_in_range() -> None:
    weights = MoEWeights(
        weight_key=qk.kInt4W4A8StaticChannelSym,
        activation_key=qk.kInt8DynamicTokenSym,
        w13=torch.full((3, 384, 256), -8, dtype=torch.int8),
        w2=torch.full((3, 256, 192), 7, dtype=torch.int8),
        w13_scale=torch.ones(3, 384, 1),
        w2_scale=torch.ones(3, 256, 1),
    )
    weights.validate(CONFIG, values=True)
    weights.w2[1, 2, 3] = 8
    with pytest.raises(TensorError, match=r"\bw2 .*8 at \[1, 2, 3\]"):
        weights.validate(CONFIG, values=True)


def test_nan_codes_are_found() -> None:
    codes = torch.zeros(4, dtype=torch.uint8)
    codes[2] = 0xFF
    with pytest.raises(TensorError, match=r"\bw .*\[2\]"):
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
    with pytest.raises(TensorError, match=r"w13 .*\[1, 3, 4\]"):
        held.copy_(kernel_weights(2.0, rows=3))
    with pytest.raises(TensorError, match="weights"):
        held.copy_(replace(kernel_weights(2.0), extra={"locks": torch.zeros(1)}))
    assert all(bool((t == 1).all()) for _, t in held.tensors())
