"""The activation kernel against float64, with bias and rows out of use."""

from __future__ import annotations

import pytest
import torch
from moe_core.errors import ConfigError, TensorError
from moe_core.kernels.ops.activation import fused_activation
from moe_core.spec.activation import ActivationParams, MoEActivation, apply_moe_activation

A = MoEActivation
PARAMS = [None, ActivationParams(limit=1.5)]


def tolerance(x, want, dtype):
    """exp of a GPU: 2^-22 and the rounding of its argument, |x| 1.5 * 2^-24; quotients and products 4 * 2^-23.

    Two such factors; tanh and erf are exact to 2^-22 of 1, whatever their value.
    """
    largest = x.abs().max().item()
    relative = 2 * (2.0**-22 + 2 * largest * 1.5 * 2.0**-24 + 4 * 2.0**-23)
    absolute = 2.0**-21 * (largest + 3) ** 2
    return want.abs() * (relative + torch.finfo(dtype).eps / 2) + absolute


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("activation", list(MoEActivation))
def test_float64(activation, params, backend, device):
    generator = torch.Generator().manual_seed(0)
    columns = 130 if activation.is_gated else 65
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = (torch.randn(3, columns, generator=generator) * 4).to(dtype)
        bias = torch.randn(columns, generator=generator).to(dtype)
        y = fused_activation(activation, x.to(device), params=params, bias=bias.to(device), backend=backend).cpu()
        assert y.dtype is dtype
        want = apply_moe_activation(activation, x.double() + bias.double(), params)
        error = (y.double() - want).abs()
        assert (error <= tolerance(x.double() + bias.double(), want, dtype)).all(), (dtype, error.max())


#: in float32, which every backend computes in
UNIT = 2.0**-23
#: 1e-12 to 1e4 of either sign
MAGNITUDES = torch.logspace(-12, 4, 49, dtype=torch.float64)
SIGNED = torch.cat((-MAGNITUDES, MAGNITUDES))
RANGES = [
    (A.SITU, ActivationParams(beta=3.0, limit=7.0)),
    (A.SWIGLUOAI, ActivationParams(alpha=0.5, beta=0.25, limit=3.0)),
    *((activation, params) for activation in A for params in PARAMS),
]


def logistic(argument):
    """Relative error of the logistic function, whose argument has five roundings.

    exp of a GPU is exact to 2^-22; what it is off counts where it is more than the 1 beside it.  A sum, a quotient
    (two units), and a product follow.
    """
    return UNIT * ((2 + 4 * argument.abs()) * torch.sigmoid(-argument) + 4)


def largest_error(activation, gate, up, want, params):
    """How far float32 arithmetic on a GPU may be from float64 ``want``: relative to it, save where something cancels.

    - tanh: to 12 units, by the difference where it is at least 1/2; a quotient (two units) before, two products behind
    - GELU of a negative gate: 1 + erf(g / sqrt 2) cancels; erf is exact to two units, whatever is left
    - an exponential beyond the largest float32 leaves 0 of what would be subnormal
    """
    name = activation.value.removesuffix("_no_mul")
    used = activation.resolve_params(params)
    relative = torch.full_like(want, 4 * UNIT)
    absolute = 4 * torch.finfo(torch.float32).tiny * (1 + gate.abs()) * (1 + up.abs())
    limited = gate if used.limit is None or name in ("situ", "swiglustep") else gate.clamp_max(used.limit)
    if name == "gelu":
        absolute += torch.where(gate < 0, 2 * UNIT * (gate * up).abs(), 0.0)
    elif name == "gelu_tanh":
        relative += logistic(1.5957691216057308 * (limited + 0.044715 * limited**3))
    elif name != "relu2":
        relative += logistic((used.alpha or 1.0) * limited)
    if name == "situ":
        relative += (16 if used.limit is None else 32) * UNIT
    return relative * want.abs() + absolute


@pytest.mark.parametrize(("activation", "params"), RANGES, ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_magnitudes(activation, params, dtype, backend, device):
    gate = SIGNED.expand(len(SIGNED), -1).to(dtype)
    up = gate.T if activation.is_gated else torch.ones_like(gate)
    x = torch.cat((gate, up), dim=1) if activation.is_gated else gate
    y = fused_activation(activation, x.to(device), params=params, backend=backend).cpu()
    want = apply_moe_activation(activation, x.double(), params)
    bound = largest_error(activation, gate.double(), up.double(), want, params)
    info = torch.finfo(dtype)
    bound += info.eps / 2 * (want.abs() + bound) + info.tiny * info.eps
    fits = want.abs() + bound <= info.max  # what float16 does not hold becomes infinite
    error = (y.double() - want).abs()[fits]
    assert (error <= bound[fits]).all(), (error / bound[fits]).max()
    assert torch.equal(y[~fits & (want.abs() > 1.01 * info.max)].isinf().all(), torch.tensor(True))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_bias_by_expert(backend, device):
    x = torch.randn(5, 12, device=device)
    bias = torch.randn(3, 12, device=device)
    experts = torch.tensor([2, 0, -1, 3, 2], device=device)
    y = fused_activation(A.SILU, x, bias=bias, row_experts=experts, backend=backend)
    rows = torch.stack([bias[2], bias[0], torch.zeros_like(bias[0]), torch.zeros_like(bias[0]), bias[2]])
    torch.testing.assert_close(y, apply_moe_activation(A.SILU, x + rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("bias_rows", [None, 1, 3])
def test_batched(backend, bias_rows, device):
    x = torch.randn(3, 4, 10, device=device)
    counts = torch.tensor([0, 4, 2], dtype=torch.int32, device=device)
    bias = None if bias_rows is None else torch.randn(bias_rows, 10, device=device)
    if bias_rows == 1:
        bias = bias[0]
    out = torch.full((3, 4, 5), 77.0, device=device)
    x[0] = float("nan")
    x[2, 2:] = float("nan")
    assert fused_activation(A.GELU, x, bias=bias, row_counts=counts, out=out, backend=backend) is out
    shifted = x if bias is None else x + (bias if bias.dim() == 1 else bias[:, None, :])
    want = apply_moe_activation(A.GELU, shifted)
    torch.testing.assert_close(out[1], want[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[2, :2], want[2, :2], rtol=1e-5, atol=1e-5)
    assert (out[0] == 77.0).all()
    assert (out[2, 2:] == 77.0).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_strides_sizes_and_other_output(backend, device):
    wide = torch.randn(7, 90, device=device)
    x = wide.T[::3]  # [30, 7], every stride unusual
    x = x[:, :6]
    y = fused_activation(A.SILU, x, backend=backend)
    torch.testing.assert_close(y, apply_moe_activation(A.SILU, x.contiguous()), rtol=1e-5, atol=1e-6)
    room = torch.zeros(30, 8, dtype=torch.bfloat16, device=device)
    fused_activation(A.SILU, x, out=room[:, 2:5], backend=backend)
    torch.testing.assert_close(room[:, 2:5].float(), y, rtol=2**-8, atol=1e-6)
    assert not room[:, :2].any()
    assert not room[:, 5:].any()
    assert fused_activation(A.SILU, torch.empty(0, 6, device=device), backend=backend).shape == (0, 3)
    assert fused_activation(A.SILU, torch.empty(4, 0, device=device), backend=backend).shape == (4, 0)


@pytest.mark.parametrize("activation", list(MoEActivation))
def test_nan_shows(activation, device):
    x = torch.full((1, 4), float("nan"), device=device)
    assert fused_activation(activation, x, params=ActivationParams(limit=1.0), backend="triton").isnan().all()


def test_wrong_arguments(device):
    x = torch.randn(4, 6, device=device)
    for keywords, message in (
        ({"bias": torch.zeros(5, device=device)}, r"bias .*\[5\]"),
        ({"bias": torch.zeros(2, 6, device=device)}, "needs row_experts"),
        ({"row_experts": torch.zeros(3, dtype=torch.int32)}, r"row_experts .*\[3\]"),
        ({"row_counts": torch.zeros(2, dtype=torch.int32)}, r"row_counts .*\[2\]"),
        ({"out": torch.zeros(4, 6, device=device)}, r"out .*\[4, 6\]"),
        ({"out": torch.zeros(3, 4, device=device).T}, "column stride 4"),
    ):
        with pytest.raises(TensorError, match=message):
            fused_activation(A.SILU, x, **keywords)
    with pytest.raises(TensorError, match="5 columns"):
        fused_activation(A.SILU, x[:, :5])
    with pytest.raises(TensorError, match="int32"):
        fused_activation(A.SILU, x.int())
    with pytest.raises(TensorError, match=r"shape \[6\]"):
        fused_activation(A.SILU, x[0])
    with pytest.raises(ConfigError, match="beta"):
        fused_activation(A.SILU, x, params=ActivationParams(beta=1.0))
