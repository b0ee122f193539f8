"""Products of integers are exact: on instructions that saturate too, and where float32 would round."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from moe_int8 import exact
from moe_int8.exact import exact_product

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
