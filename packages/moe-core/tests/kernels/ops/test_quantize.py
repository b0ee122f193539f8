"""Activation quantizers: the twin against tables and numpy, the kernels against the twin bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from moe_core.errors import ConfigError, TensorError
from moe_core.kernels.ops.quantize import activate_and_quantize, quantize_activation, quantize_activation_asymmetric
from moe_core.reference.quantization import quantize_tensor
from moe_core.spec.activation import ActivationParams, MoEActivation, apply_moe_activation
from moe_core.spec.numerics import e8m0_to_float32
from moe_core.spec.quant_key import (
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticTensorSym,
    kInt4Static,
    kInt8DynamicTensorSym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticTensorSym,
    kMxfp4Dynamic,
    kMxfp8Dynamic,
    kMxfp8DynamicDown,
    kMxfp8DynamicEven,
)

KEYS = [
    kFp8DynamicTokenSym,
    kFp8Dynamic128Sym,
    kFp8Dynamic64Sym,
    kMxfp8Dynamic,
    kFp8DynamicTensorSym,
    kFp8StaticTensorSym,
    kInt8DynamicTokenSym,
    kInt8DynamicTensorSym,
    kInt8StaticTensorSym,
]
#: (key, power_of_two)
FORMATS = [(key, False) for key in KEYS] + [(kFp8Dynamic128Sym, True), (kFp8Dynamic64Sym, True)]
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
STATIC = 0.0125


def hard(rows, columns, dtype, *, numbers_only=False):
    """Rows of several magnitudes, zeros, tiny and huge values, exact ties, NaN and infinity."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 1000 + columns))
    kind = torch.arange(rows) % 8
    x[kind == 1] *= 300.0
    x[kind == 2] = 0.0
    x[kind == 3] *= 1e-12
    x[kind == 4] = (x[kind == 4] * 8).round() / 16  # codes and boundaries between them
    x[kind == 5] *= 3e4 if dtype is torch.float16 else 1e37
    if not numbers_only:
        x[kind == 6, columns // 2] = math.nan
        x[kind == 7, columns // 3] = -math.inf
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype) if numbers_only else x.to(dtype)


def static(key, device="cpu"):
    return torch.tensor([STATIC], device=device) if key.is_static else None


def same(found, want):
    """Equal bits; NaNs only have to be NaN."""
    assert found.dtype is want.dtype
    assert found.shape == want.shape
    if want.dtype is torch.float8_e4m3fn:
        nan = want.float().isnan()
        assert torch.equal(found.float().isnan(), nan)
        assert torch.equal(found.view(torch.uint8)[~nan], want.view(torch.uint8)[~nan])
    elif want.is_floating_point():
        assert torch.equal(found.isnan(), want.isnan())
        assert torch.equal(found.nan_to_num(), want.nan_to_num())
    else:
        assert torch.equal(found, want)


def nearest_code(quotients, key):
    """Codes of float32 quotients by looking for the nearest value, the even code of two."""
    if key.dtype.name == "int8":
        return np.clip(np.rint(quotients), -128, 127).astype(np.int8)
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    magnitude = np.minimum(np.abs(quotients.astype(np.float64)), 448.0)
    distance = np.abs(magnitude[..., None] - table)
    # argmin takes the first of equals: look at even codes first
    order = np.concatenate([np.arange(0, 127, 2), np.arange(1, 127, 2)])
    codes = order[np.argmin(distance[..., order], axis=-1)].astype(np.uint8)
    return codes | (np.signbit(quotients).astype(np.uint8) << 7)


@pytest.mark.parametrize(("key", "power_of_two"), FORMATS, ids=str)
def test_twin_against_numpy(key, power_of_two):
    x = hard(14, 200, torch.float32, numbers_only=True)
    codes, scale = quantize_activation(x, key, static_scale=static(key), power_of_two=power_of_two, backend="torch")
    rows, columns = (1, 14 * 200) if key.group_shape.is_per_tensor else x.shape
    group = columns if key.group_size == -1 else key.group_size
    values = x.reshape(rows, columns).numpy()
    top = np.float32(448.0 if key.dtype.name == "e4m3" else 127.0)
    for start in range(0, columns, group):
        part = values[:, start : start + group]
        amax = np.maximum(np.abs(part).max(axis=1, keepdims=True), np.float32(1e-10))
        step = np.full((rows, 1), STATIC, np.float32) if key.is_static else amax / top
        if power_of_two or key == kMxfp8Dynamic:
            step = np.exp2(np.ceil(np.log2(step.astype(np.float64)))).astype(np.float32)
        found = e8m0_to_float32(scale) if scale.dtype is torch.uint8 else scale
        found = found.reshape(rows, -1)[:, start // group].numpy()
        np.testing.assert_array_equal(found, step[:, 0])
        want = nearest_code(part / step, key)
        got = codes.view(torch.int8 if want.dtype == np.int8 else torch.uint8).reshape(rows, columns).numpy()
        np.testing.assert_array_equal(got[:, start : start + group], want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("key", "power_of_two"), FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(8, 300), (3, 128), (1, 1), (2, 4096)], ids=str)
def test_kernel_has_the_bits_of_the_twin(key, power_of_two, dtype, shape, device):
    for numbers_only in (True, False):
        x = hard(*shape, dtype, numbers_only=numbers_only)
        options = {"static_scale": static(key), "power_of_two": power_of_two}
        want = quantize_activation(x, key, **options, backend="torch")
        options["static_scale"] = static(key, device)
        found = quantize_activation(x.to(device), key, **options, backend="triton")
        same(found[0].cpu(), want[0])
        same(found[1].cpu(), want[1])
        # the twin has the same bits on a GPU
        if device.type == "cuda":
            again = quantize_activation(x.to(device), key, **options, backend="torch")
            same(again[0].cpu(), want[0])
            same(again[1].cpu(), want[1])


@pytest.mark.gpu
@pytest.mark.parametrize(("key", "power_of_two"), FORMATS, ids=str)
def test_many_rows_on_a_gpu(key, power_of_two, device):
    for shape in ((4096, 7168), (3001, 2880), (17, 20000)):
        x = hard(*shape, torch.bfloat16, numbers_only=True).to(device)
        options = {"static_scale": static(key, device), "power_of_two": power_of_two}
        want = quantize_activation(x, key, **options, backend="torch")
        found = quantize_activation(x, key, **options, backend="triton")
        same(found[0], want[0])
        same(found[1], want[1])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_longer_than_registers(backend, device, monkeypatch):
    x = hard(8, 300, torch.float32)
    want = quantize_activation(x, kFp8DynamicTokenSym, backend="torch")
    if backend == "triton":
        from moe_core.kernels.ops import _quantize_launch

        monkeypatch.setattr(_quantize_launch, "_MAX_ROW", 128)
    found = quantize_activation(x.to(device), kFp8DynamicTokenSym, backend=backend)
    same(found[0].cpu(), want[0])
    same(found[1].cpu(), want[1])
    want = quantize_activation_asymmetric(x, kInt8DynamicTokenAsym, backend="torch")
    found = quantize_activation_asymmetric(x.to(device), kInt8DynamicTokenAsym, backend=backend)
    for got, expected in zip(found[:3], want[:3], strict=True):
        same(got.cpu(), expected)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_zeros_have_a_finite_scale(backend, device):
    for key in (kFp8DynamicTokenSym, kFp8Dynamic128Sym, kMxfp8Dynamic, kFp8DynamicTensorSym, kInt8DynamicTokenSym):
        codes, scale = quantize_activation(torch.zeros(3, 130, device=device), key, backend=backend)
        value = e8m0_to_float32(scale) if scale.dtype is torch.uint8 else scale
        assert (value > 0).all()
        assert value.isfinite().all()
        assert not codes.float().any()


def test_e8m0_rounds_up_so_that_nothing_saturates(device):
    # 448 fits the scale 1, the next value does not
    x = torch.tensor([[448.0], [448.00003], [224.0], [449.0], [1.75], [1.7500001]])
    for backend in ("torch", "triton"):
        codes, scale = quantize_activation(x.to(device), kMxfp8Dynamic, backend=backend)
        assert (scale.cpu().int() - 127).flatten().tolist() == [0, 1, -1, 1, -8, -7]
        assert codes.float().cpu().flatten().tolist() == [448.0, 224.0, 448.0, 224.0, 448.0, 224.0]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_is_no_number_shows(backend, device):
    x = torch.ones(3, 32, device=device)
    x[1, 3], x[2, 4] = math.nan, math.inf
    for key in (kFp8DynamicTokenSym, kMxfp8Dynamic, kInt8DynamicTokenSym, kFp8Dynamic64Sym):
        codes, scale = quantize_activation(x, key, backend=backend)
        value = e8m0_to_float32(scale) if scale.dtype is torch.uint8 else scale
        product = codes.float() * value
        assert product[0].isfinite().all()
        assert product[1:].isnan().all(), key


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_asymmetric(backend, device):
    x = hard(8, 77, torch.float32)
    x[0] = x[0].abs() + 1  # one-sided: the range still includes 0
    x[1] = -x[1].abs() - 1
    want = quantize_activation_asymmetric(x, kInt8DynamicTokenAsym, backend="torch")
    found = quantize_activation_asymmetric(x.to(device), kInt8DynamicTokenAsym, backend=backend)
    for got, expected in zip(found[:3], want[:3], strict=True):
        same(got.cpu(), expected)
    good = slice(0, 6)
    codes, scale, zero = want.values[good].double(), want.scale[good].double(), want.zero_point[good].double()
    # half a step from the code's rounding, half from the zero point's where the range's end saturates, float32's own
    error = ((codes - zero) * scale - x[good].double()).abs()
    assert (error <= scale * (1 + 2.0**-15)).all()
    assert (error <= scale * 0.5001).double().mean() > 0.95
    assert ((zero >= -128) & (zero <= 127)).all()


ACTIVATED = [
    (MoEActivation.SILU, None),
    (MoEActivation.SWIGLUOAI, None),
    (MoEActivation.SILU, ActivationParams(limit=1.0)),
    (MoEActivation.RELU2_NO_MUL, None),
]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("activation", "params"), ACTIVATED, ids=str)
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_behind_an_activation(key, activation, params, backend, device):
    columns = 400 if activation.is_gated else 200
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, columns, generator=generator).bfloat16()
    bias = torch.randn(3, columns, generator=generator)
    experts = torch.tensor([0, 2, 1, 0], dtype=torch.int32)
    codes, scale = activate_and_quantize(
        activation,
        x.to(device),
        key,
        params=params,
        bias=bias.to(device),
        row_experts=experts.to(device),
        static_scale=static(key, device),
        backend=backend,
    )
    assert codes.shape == (4, 200)
    want = apply_moe_activation(activation, x.double() + bias[experts.long()].double(), params)
    value = (e8m0_to_float32(scale) if scale.dtype is torch.uint8 else scale).double().cpu()
    if value.numel() > 4:
        value = value.repeat_interleave(key.group_size, dim=1)[:, :200]
    found = codes.double().cpu() * value
    if key.dtype.name == "e4m3":
        step = torch.maximum(want.abs() * 2.0**-4, value * 2.0**-10)
        most = 448.0
    else:
        step, most = value / 2, 127.0
    clipped = want.clamp(min=-value * (most + 1), max=value * most) if key.is_static else want
    # half a step, and the activation's own error (see test_activation), which may also move the scale
    slack = 2.0**-15 * (want.abs() + 1)
    assert ((found - clipped).abs() <= step * (1 + 2.0**-10) + slack).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("key", [kFp8Dynamic64Sym, kMxfp8Dynamic, kInt8DynamicTokenSym], ids=str)
def test_batched_rows_in_use(key, backend, device):
    x = torch.randn(3, 4, 100, device=device)
    counts = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    dtype = torch.int8 if key.dtype.name == "int8" else torch.float8_e4m3fn
    out = torch.full((3, 4, 100), 33, dtype=torch.uint8, device=device).view(dtype)
    groups = key.group_shape.grid(4, 100)[1]
    scales = torch.full((3, 4, groups), 33, device=device).to(key.scale.dtype)
    want, want_scale = quantize_activation(x.view(12, 100), key, backend="torch")
    x[1], x[2, 2:] = math.nan, math.nan
    codes, scale = quantize_activation(x, key, row_counts=counts, out=out, scale_out=scales, backend=backend)
    assert codes is out
    assert scale is scales
    used = torch.tensor([True] * 4 + [False] * 4 + [True] * 2 + [False] * 2, device=device)
    assert torch.equal(out.view(torch.uint8).view(12, -1)[used], want.view(torch.uint8)[used])
    assert (out.view(torch.uint8).view(12, -1)[~used] == 33).all()
    assert torch.equal(scales.view(12, -1)[used], want_scale[used])
    assert (scales.view(12, -1)[~used] == 33).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_strides(backend, device):
    x = torch.randn(200, 6, device=device).T
    want, want_scale = quantize_activation(x.contiguous(), kFp8Dynamic64Sym, backend="torch")
    room = torch.zeros(6, 256, dtype=torch.float8_e4m3fn, device=device)
    by_column = torch.zeros(4, 6, device=device)
    codes, scale = quantize_activation(x, kFp8Dynamic64Sym, out=room[:, :200], scale_out=by_column.T, backend=backend)
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scale, want_scale)
    assert torch.equal(by_column, want_scale.T)
    assert not room[:, 200:].float().any()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_nothing(key, backend, device):
    for shape in ((0, 100), (3, 0)):
        codes, scale = quantize_activation(
            torch.empty(shape, device=device), key, static_scale=static(key, device), backend=backend
        )
        assert codes.shape == shape
        assert scale.shape == ((1,) if key.group_shape.is_per_tensor else (shape[0], *scale.shape[1:]))


def test_wrong_calls(device):
    x = torch.randn(4, 64, device=device)
    for key, keywords, message in (
        (kMxfp4Dynamic, {}, "e4m3 or int8"),
        (kInt4Static, {}, "e4m3 or int8"),
        (kInt8DynamicTokenAsym, {}, "use quantize_activation_asymmetric"),
        (kFp8Dynamic128Sym.with_group(1, 96), {}, "1024"),
        (kFp8Dynamic128Sym.with_group(128, 128), {}, "1 x G"),
        (kFp8DynamicTokenSym.with_scale_dtype(torch.bfloat16), {}, "e8m0"),
        (kFp8DynamicTokenSym, {"power_of_two": True}, "power_of_two"),
    ):
        with pytest.raises(ConfigError, match=message):
            quantize_activation(x, key, **keywords)
    for key, keywords, message in (
        (kFp8StaticTensorSym, {}, "static_scale"),
        (kFp8Static128BlockSym, {}, "1 x G|static_scale"),
        (kFp8DynamicTokenSym, {"static_scale": torch.ones(1)}, "static_scale"),
        (kFp8StaticTensorSym, {"static_scale": torch.ones(2, device=device)}, "one element"),
        (kFp8DynamicTokenSym, {"out": torch.zeros(4, 64, device=device)}, "out .*torch.float32"),
        (kFp8DynamicTokenSym, {"scale_out": torch.zeros(4, device=device)}, r"expected torch.float32 \[4, 1\]"),
    ):
        with pytest.raises((TensorError, ConfigError), match=message):
            quantize_activation(x, key, **keywords)
    with pytest.raises(ConfigError, match="zero points|zero_point"):
        quantize_activation_asymmetric(x, kInt8DynamicTokenSym)
    with pytest.raises(TensorError, match="int32"):
        quantize_activation(x.int(), kFp8DynamicTokenSym)


@pytest.mark.parametrize("gated", [False, True])
def test_columns_may_lie_any_number_of_elements_apart(gated, device):
    """Three columns, the last 2**31 elements behind the first; on a CPU most of the 4 GB are never touched."""
    apart, values = 2**30, torch.tensor([[1.0, -2.0, 4.0, 3.0], [5.0, 6.0, -7.0, 8.0]], dtype=torch.bfloat16)
    columns = values.shape[1] if gated else 3
    step = apart if not gated else -(-(2**31) // 3)
    try:
        memory = torch.empty((columns - 1) * step + 2, dtype=torch.bfloat16, device=device)
    except (RuntimeError, torch.OutOfMemoryError):
        pytest.skip("there is no room for 4.3 GB")
    x = memory.as_strided((2, columns), (1, step))
    x.copy_(values[:, :columns])
    for key in (kInt8DynamicTokenSym, kInt8DynamicTensorSym, kMxfp8Dynamic):
        if gated:
            found = activate_and_quantize(MoEActivation.SILU, x, key, backend="triton")
            expected = activate_and_quantize(MoEActivation.SILU, x.contiguous(), key, backend="triton")
        else:
            found = quantize_activation(x, key, backend="triton")
            expected = quantize_activation(x.contiguous(), key, backend="triton")
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("key", [kMxfp8DynamicEven, kMxfp8DynamicDown], ids=str)
def test_kernels_do_not_round_scales_another_way_than_the_key(key, device):
    x = torch.randn(4, 96, device=device)
    with pytest.raises(ConfigError, match="rounded up"):
        quantize_activation(x, key, backend="triton")
    codes, scale = quantize_activation(x, key)
    want = quantize_tensor(x.cpu(), key)
    assert torch.equal(codes.cpu().view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(scale.cpu(), want.scale)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_range_beyond_float32_shows(backend, device):
    x = torch.ones(3, 8, device=device)
    x[1, :2] = torch.tensor([3e38, -3e38])
    _, scale, *_ = quantize_activation_asymmetric(x, kInt8DynamicTokenAsym, backend=backend)
    assert scale.flatten().isnan().tolist() == [False, True, False]
