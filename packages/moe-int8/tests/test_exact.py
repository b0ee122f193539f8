"""Products of integers are exact: on instructions that saturate too, and where float32 would round."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from moe_int8 import exact
from moe_int8.exact import exact_product, scaled_product

SHAPES = ((1, 24, 7), (3, 136, 200), (16, 2048, 64), (33, 5000, 48))
#: what oneDNN makes of a CPU that knows no VNNI: products added in pairs in int16
OLD_CPU = {"ONEDNN_MAX_CPU_ISA": "AVX2"}


def check() -> None:
    """Random and extreme codes against float64, which holds all of these sums."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns, outputs in SHAPES:
        for low, high in ((-128, 128), (-128, -127), (127, 128)):
            x = torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.int8)
            w = torch.randint(-128, 128 if low != high - 1 else -127, (outputs, columns), generator=generator)
            w = w.to(torch.int8)
            assert torch.equal(exact_product(x, w).double(), x.double() @ w.double().T)
            # a group's columns lie apart
            part = slice(8, 24)
            assert torch.equal(
                exact_product(x[:, part], w[:, part]).double(), x[:, part].double() @ w[:, part].double().T
            )


def test_on_this_cpu() -> None:
    check()


@pytest.mark.parametrize("groups", [1, 3, 8, 16])
@pytest.mark.parametrize("rows", [1, 3, 5, 8, 9, 40])
def test_groups(rows: int, groups: int) -> None:
    """Whether several are multiplied together or not: scales of powers of two, so that nothing is rounded."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-128, 128, (rows, 32 * groups), generator=generator, dtype=torch.int8)
    w = torch.randint(-8, 8, (24, 32 * groups), generator=generator, dtype=torch.int8)
    scale = torch.exp2(torch.randint(-3, 3, (24, groups), generator=generator).float())
    zero_point = torch.randint(-128, 128, (rows, 1), generator=generator, dtype=torch.int32)
    sums = w.view(24, groups, 32).sum(dim=2, dtype=torch.int32)
    spread = scale.double().repeat_interleave(32, dim=1)
    assert torch.equal(scaled_product(x, w, scale).double(), x.double() @ (w.double() * spread).T)
    found = scaled_product(x, w, scale, zero_point=zero_point, code_sums=sums)
    assert torch.equal(found.double(), (x - zero_point).double() @ (w.double() * spread).T)


def test_in_float(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_int_mm_is_exact", lambda: False)
    check()


def test_on_a_cpu_whose_int8_products_saturate() -> None:
    """In a process of its own: oneDNN reads the limit once."""
    program = f"import runpy; runpy.run_path({__file__!r})['check']()"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **OLD_CPU}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
