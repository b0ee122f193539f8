"""Activations against formulas written out with Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from moe_core.errors import ConfigError, TensorError
from moe_core.spec.activation import ActivationParams, MoEActivation, apply_moe_activation

A = MoEActivation


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def silu(x):
    return x * sigmoid(x)


def gelu(x):
    return x * 0.5 * math.erfc(-x / math.sqrt(2))


def gelu_tanh(x):
    # 1 + tanh(z) = 2 sigmoid(2z), which does not cancel
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def relu2(x):
    return max(x, 0.0) ** 2


def expected(activation, gate, up, alpha, beta, limit):
    """One element, from the definitions."""
    plain = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu2": relu2}
    name = activation.value.removesuffix("_no_mul")
    bounded = math.inf if limit is None else limit
    if activation is A.SWIGLUSTEP:
        return min(silu(gate), bounded) * max(min(up, bounded), -bounded)
    if activation is A.SITU:
        soft = up if limit is None else limit * math.tanh(up / limit)
        return beta * math.tanh(gate / beta) * sigmoid(gate) * soft
    gate, up = min(gate, bounded), max(min(up, bounded), -bounded)
    if activation is A.SWIGLUOAI:
        return gate * sigmoid(alpha * gate) * (up + beta)
    return plain[name](gate) * (up if activation.is_gated else 1.0)


PARAMS = [
    None,
    ActivationParams(limit=1.5),
    ActivationParams(limit=math.inf),
    ActivationParams(alpha=0.7, beta=2.5, limit=3.0),
]


def accepts(activation, params):
    given = {name for name in ("alpha", "beta") if params is not None and getattr(params, name) is not None}
    return given <= activation.parameters


CASES = [(a, p) for a in MoEActivation for p in PARAMS if accepts(a, p)]


@pytest.mark.parametrize(("activation", "params"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_formula(activation, params, dtype):
    generator = torch.Generator().manual_seed(0)
    columns = 2 * 33 if activation.is_gated else 33
    x = (torch.randn(5, columns, generator=generator, dtype=torch.float64) * 4).to(dtype)
    y = apply_moe_activation(activation, x, params)
    assert y.dtype is dtype
    assert y.shape == (5, 33)
    used = activation.resolve_params(params)
    gate, up = x[:, :33].double(), x[:, -33:].double()
    want = torch.tensor(
        [
            [expected(activation, g, u, used.alpha, used.beta, used.limit) for g, u in zip(gs, us, strict=True)]
            for gs, us in zip(gate.tolist(), up.tolist(), strict=True)
        ],
        dtype=torch.float64,
    )
    assert_close(activation, y, want, gate, used)


def assert_close(activation, y, want, gate, params):
    """A handful of roundings in the computing type, one to the result's; none of the formulas cancels.

    Roundings of an exponent count times the exponent: x^2 / 2 for GELU, 2 sqrt(2 / pi) (x + 0.044715 x^3) for
    GELU_TANH, alpha x for the others.
    """
    compute = torch.finfo(torch.float64 if y.dtype is torch.float64 else torch.float32)
    # exponents from 87 on leave nothing in float32, from 745 on in float64
    limit = 1e9 if params.limit is None or activation in (A.SITU, A.SWIGLUSTEP) else params.limit
    used = gate.clamp_max(limit).abs()
    exponent = {A.GELU: used**2, A.GELU_TANH: 1.6 * (used + 0.044715 * used**3)}.get(
        A(activation.value.removesuffix("_no_mul")), (params.alpha or 1.0) * used
    )
    units = 16 + 4 * exponent.clamp_max(745.0)
    info = torch.finfo(y.dtype)
    flushed = 4 * compute.tiny * (1 + gate.abs()) ** 2
    tolerance = (units * compute.eps + info.eps / 2) * want.abs() + flushed + info.tiny * info.eps
    fits = want.abs() + tolerance <= info.max
    error = (y.double() - want).abs()
    assert (error <= tolerance)[fits].all(), (error / tolerance)[fits].max()


@pytest.mark.parametrize(("activation", "params"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_magnitudes(activation, params, dtype):
    sizes = torch.logspace(-12, 4, 97, dtype=torch.float64)
    gate = torch.cat((-sizes, sizes)).to(dtype)
    for up in (torch.full_like(gate, 0.75), gate, -gate, gate.flip(0)):
        x = torch.cat((gate, up)) if activation.is_gated else gate
        y = apply_moe_activation(activation, x, params)
        used = activation.resolve_params(params)
        want = [
            expected(activation, g, u, used.alpha, used.beta, used.limit)
            for g, u in zip(gate.tolist(), up.tolist(), strict=True)
        ]
        assert_close(activation, y, torch.tensor(want, dtype=torch.float64), gate.double(), used)


def test_gate_comes_first():
    x = torch.tensor([[1.0, 2.0, 10.0, 20.0]])
    y = apply_moe_activation(A.SILU, x)
    torch.testing.assert_close(y, torch.tensor([[silu(1.0) * 10, silu(2.0) * 20]]))


def test_swigluoai_has_the_parameters_of_gpt_oss():
    assert A.SWIGLUOAI.default_params() == ActivationParams(alpha=1.702, beta=1.0, limit=7.0)
    assert A.SWIGLUOAI.resolve_params(ActivationParams(limit=5.0)) == ActivationParams(1.702, 1.0, 5.0)
    assert A.SWIGLUOAI.resolve_params(ActivationParams(limit=math.inf)).limit == math.inf  # not the default of 7
    assert A.SWIGLUOAI_UNINTERLEAVE is A.SWIGLUOAI
    x = torch.tensor([[100.0, -100.0]])
    # the gate is cut at 7, up at -7
    torch.testing.assert_close(apply_moe_activation(A.SWIGLUOAI, x), torch.tensor([[7 * sigmoid(1.702 * 7) * -6]]))


def test_silu_limit_does_not_cut_a_negative_gate():
    x = torch.tensor([[-9.0, 9.0, 1.0, 1.0]])
    y = apply_moe_activation(A.SILU, x, ActivationParams(limit=2.0))
    torch.testing.assert_close(y, torch.tensor([[silu(-9.0), silu(2.0)]]))


@pytest.mark.parametrize("activation", list(MoEActivation))
@pytest.mark.parametrize("params", [None, ActivationParams(limit=1.0)], ids=str)
def test_nan_shows(activation, params):
    # a limit that swallowed NaN would hide it
    x = torch.full((1, 4), float("nan"))
    assert apply_moe_activation(activation, x, params).isnan().all()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 3, 8)])
def test_any_leading_dimensions(shape):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(apply_moe_activation(A.SILU, x), gate / (1 + torch.exp(-gate)) * up)
    assert torch.equal(apply_moe_activation(A.RELU2_NO_MUL, x), x.clamp_min(0) ** 2)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("silu", A.SILU),
        ("SiLU", A.SILU),
        ("gelu_pytorch_tanh", A.GELU_TANH),
        ("swigluoai_uninterleave", A.SWIGLUOAI),
        ("relu2_no_mul", A.RELU2_NO_MUL),
        (A.SITU, A.SITU),
    ],
)
def test_parse(name, want):
    assert A.parse(name) is want


def test_parse_names_what_is_known():
    with pytest.raises(ConfigError, match="activation 'mish'"):
        A.parse("mish")
    with pytest.raises(ConfigError, match="got 3"):
        A.parse(3)


def test_every_value_parses_to_itself():
    assert [A.parse(a.value) for a in A] == list(A)
    assert {a for a in A if not a.is_gated} == {A.SILU_NO_MUL, A.GELU_NO_MUL, A.GELU_TANH_NO_MUL, A.RELU2_NO_MUL}


def test_wrong_parameters():
    with pytest.raises(ConfigError, match="alpha=2"):
        A.SILU.resolve_params(ActivationParams(alpha=2.0))
    with pytest.raises(ConfigError, match="positive"):
        ActivationParams(limit=0.0)
    with pytest.raises(ConfigError, match=r"\bbeta\b"):
        ActivationParams(beta=math.nan)
    for name in ("alpha", "beta"):
        with pytest.raises(ConfigError, match=f"{name}"):
            ActivationParams(**{name: -math.inf})
    with pytest.raises(ConfigError, match=r"\bbeta\b"):
        A.SITU.resolve_params(ActivationParams(beta=0.0))


def test_wrong_input():
    with pytest.raises(TensorError, match="5 columns"):
        apply_moe_activation(A.SILU, torch.ones(2, 5))
    with pytest.raises(TensorError, match="int32"):
        apply_moe_activation(A.SILU, torch.ones(2, 4, dtype=torch.int32))


@pytest.mark.parametrize("activation", list(MoEActivation))
@pytest.mark.parametrize("limit", [None, 0.5, math.inf])
def test_resolved_parameters_stay_as_they_are(activation: MoEActivation, limit: float | None) -> None:
    once = activation.resolve_params(ActivationParams(limit=limit))
    assert activation.resolve_params(once) == once
    x = 20 * torch.randn(64, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = apply_moe_activation(activation, x, ActivationParams(limit=limit))
    assert torch.equal(apply_moe_activation(activation, x, once), given)
