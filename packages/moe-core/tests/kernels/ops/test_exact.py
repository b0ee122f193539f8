"""float32 functions that have the same bits in torch and in Triton."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from moe_core._support import exact as _exact
from moe_core.kernels.ops import _exact_kernels as kernels

UNIT = 2.0**-24  # half a unit in the last place, relative


@triton.jit
def _apply(x, out, FUNCTION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    value = tl.load(x + place)
    if FUNCTION == "exp_nonpositive":
        value = kernels.exp_nonpositive(value)
    elif FUNCTION == "sigmoid":
        value = kernels.sigmoid(value)
    elif FUNCTION == "sqrt_softplus":
        value = kernels.sqrt_softplus(value)
    elif FUNCTION == "sum_unit_terms":
        value = tl.broadcast_to(kernels.sum_unit_terms(value), [ROWS, COLUMNS])
    elif FUNCTION == "sum_pairwise":
        value = tl.broadcast_to(kernels.sum_pairwise(value), [ROWS, COLUMNS])
    elif FUNCTION == "ordered":
        value = kernels.ordered_float(kernels.ordered_int(value))
    else:
        value = kernels.round_half_even(value)
    tl.store(out + place, value)


def on_device(function, x, device):
    out = torch.empty_like(x, device=device)
    _apply[(1,)](x.to(device), out, function, x.shape[0], x.shape[1], enable_fp_fusion=False)
    return out.cpu()


def samples(low, high):
    generator = torch.Generator().manual_seed(0)
    x = low + (high - low) * torch.rand(4096, generator=generator)
    small = torch.randn(4096, generator=generator) * torch.exp2(-20 * torch.rand(4096, generator=generator))
    x = torch.cat([x, small.clamp(low, high), torch.tensor([low, high, 0.0, -0.0]).repeat(2048)])
    return x.view(16, 1024)


@pytest.mark.parametrize(
    ("name", "low", "high", "reference", "units"),
    [
        # last sum 1, last product 0.4, the polynomial before it 0.5, r 0.3, remainder 0.1
        ("exp_nonpositive", -86.0, 0.0, torch.exp, 3),
        # plus an addition and a division
        ("sigmoid", -80.0, 80.0, torch.sigmoid, 5),
        # exp (3), two divisions and sums (4), polynomial (3), halved by the root, plus its own
        ("sqrt_softplus", -80.0, 80.0, lambda x: torch.log1p(torch.exp(-x.abs())).add(x.clamp(min=0)).sqrt(), 6),
    ],
)
def test_accuracy_and_bits(name, low, high, reference, units, device):
    x = samples(low, high)
    y = getattr(_exact, name)(x)
    want = reference(x.double())
    assert ((y - want).abs() <= units * UNIT * want).all(), ((y - want).abs() / want).max() / UNIT
    assert torch.equal(y, on_device(name, x, device))
    if device.type != "cpu":
        assert torch.equal(y, getattr(_exact, name)(x.to(device)).cpu())


def test_limits():
    inf = torch.tensor([float("-inf"), float("inf")])
    assert _exact.exp_nonpositive(torch.tensor([float("-inf"), -87.0])).tolist() == [0.0, 0.0]
    assert _exact.sigmoid(inf).tolist() == [0.0, 1.0]
    assert _exact.sqrt_softplus(inf).tolist() == [0.0, float("inf")]


def test_a_fixed_point_sum_does_not_depend_on_the_order(device):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(16, 1024, generator=generator) ** 8
    one = _exact.sum_unit_terms(x)
    assert torch.equal(one, _exact.sum_unit_terms(x[:, torch.randperm(1024, generator=generator)]))
    # each term loses less than 2^-40, the conversion half a unit
    assert ((one - x.double().sum(1, keepdim=True)).abs() <= 1024 * 2.0**-40 + UNIT * one.double()).all()
    assert torch.equal(on_device("sum_unit_terms", x, device)[:, :1], one)


@pytest.mark.parametrize("columns", [1, 2, 5, 8, 32])
def test_pairwise_sum(columns, device):
    x = torch.randn(16, columns, generator=torch.Generator().manual_seed(0))
    y = _exact.sum_pairwise(x)
    torch.testing.assert_close(y, x.sum(1, keepdim=True))
    padded = torch.nn.functional.pad(x, (0, triton.next_power_of_2(columns) - columns))
    assert torch.equal(on_device("sum_pairwise", padded, device)[:, :1], y)


def test_ordered_integers(device):
    x = torch.tensor([float("-inf"), -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3e38, float("inf")])
    keys = _exact.ordered_int(x)
    assert keys[4] == keys[5]
    assert (keys[1:] >= keys[:-1]).all()
    assert keys.unique().numel() == 9
    back = on_device("ordered", torch.nn.functional.pad(x, (0, 6)).view(1, 16), device)[0, :10]
    assert torch.equal(back, x)


def test_rounding_goes_to_the_even_integer(device):
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 0.4999, 254.5, 1e6 + 0.5]])
    assert torch.equal(on_device("round_half_even", x, device), x.round())
