"""The interpreter made faster computes what it did, and gives the language back."""

from __future__ import annotations

import os

import pytest
import torch

tl = pytest.importorskip("triton.language")
triton = pytest.importorskip("triton")

from moe_core.testing.interpreter import quicken  # noqa: E402 - after it is known that there is a Triton

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton does not interpret here")


@triton.jit
def _halved(x):
    # a function of Triton's own library, which sees the language as another module
    return tl.cdiv(x, 2) + tl.sum(x, 0)


@triton.jit
def _twice(x):
    return _halved(x) + _halved(x)


@triton.jit
def _kernel(x, y, B: tl.constexpr, FAIL: tl.constexpr):
    i = tl.arange(0, B)
    values = tl.load(x + i)
    if FAIL:
        tl.static_assert(False, "wanted")
    tl.store(y + i, _twice(values) * 3)


@triton.jit
def _sort(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(y + i, tl.sort(tl.load(x + i)))


@triton.jit
def _round(x, y, z, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(y + i, tl.load(x + i).to(tl.bfloat16))
    tl.store(z + i, tl.load(y + i).to(tl.float32))


def launch(*, fail: bool = False) -> list[int]:
    x, y = torch.arange(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    _kernel[(2,)](x, y, B=4, FAIL=fail)
    return y.tolist()


def test_results() -> None:
    quicken()
    assert launch() == [3 * 2 * ((i + 1) // 2 + 6) for i in range(4)]


def test_the_language_is_as_before_a_launch_and_a_failed_one() -> None:
    quicken()
    before = (tl.load, tl.arange, tl.tensor.__add__, tl.tensor.T, tl.range)
    launch()
    assert (tl.load, tl.arange, tl.tensor.__add__, tl.tensor.T, tl.range) == before
    with pytest.raises(Exception, match="wanted"):
        launch(fail=True)
    assert (tl.load, tl.arange, tl.tensor.__add__, tl.tensor.T, tl.range) == before
    assert launch() == [36, 42, 42, 48]


def test_a_launch_replaces_the_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    quicken()
    language, calls = interpreter._patch_lang, []
    replace = language._replace
    monkeypatch.setattr(language, "_replace", lambda function: calls.append(function.__name__) or replace(function))
    launch()
    # the launch, and the first function that sees the language as another module; not each of 2 x 9 calls
    assert calls[0] == "_kernel"
    assert len(calls) == 2


def test_sorting_takes_no_step_per_element(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    def slow(*args: object) -> None:
        raise AssertionError("element by element")

    quicken()
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", slow)
    x = torch.randperm(256, generator=torch.Generator().manual_seed(1), dtype=torch.int32) - 99
    y = torch.zeros_like(x)
    _sort[(1,)](x, y, B=256)
    assert y.tolist() == sorted(x.tolist())


def test_bfloat16_is_what_a_gpu_makes_of_float32() -> None:
    quicken()
    count = 1 << 14
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(2))
    x = bits.to(torch.int32).view(torch.float32)
    # subnormal, the largest that rounds to one, halfway to even, just above the largest finite, NaN of one low bit
    edges = (1, 0x007F7FFF, 0x007FFFFF, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7F800001)
    x[: len(edges)] = torch.tensor(edges, dtype=torch.int32).view(torch.float32)
    y, z = torch.empty(count, dtype=torch.bfloat16), torch.empty(count)
    _round[(1,)](x, y, z, B=count)
    nan = x.isnan()
    assert torch.equal(y[~nan].view(torch.int16), x.bfloat16()[~nan].view(torch.int16))
    assert torch.equal(z[~nan].view(torch.int32), x.bfloat16().float()[~nan].view(torch.int32))
    assert y[nan].isnan().all()
    assert z[nan].isnan().all()
