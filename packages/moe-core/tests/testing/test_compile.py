"""The compile check finds what it must: in a process of its own, since this one interprets Triton kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SPECIMENS = '''
"""Kernels that fail in each of the ways that the check knows."""
import torch
import triton
import triton.language as tl

from moe_core.testing.compile import Specimen


@triton.jit
def square(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    at = i[:, None] * B + i[None, :]
    product = tl.dot(tl.load(x + at), tl.load(y + at))
    tl.store(y + at, product.to(tl.bfloat16))


def specimens(device):
    x = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    yield Specimen("fits", lambda: square[(1,)](x, x, B=32))
    yield Specimen("too big", lambda: square[(1,)](x, x, B=256))
    yield Specimen("allowed to spill", lambda: square[(1,)](x, x, B=256), max_spills=1 << 20)
    yield Specimen("no power of two", lambda: square[(1,)](x, x, B=100))
    yield Specimen("starts nothing", lambda: None)
'''


def compile_check(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    (folder / "broken_kernels.py").write_text(SPECIMENS)
    (folder / "no_kernels.py").write_text("")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "moe_core.testing.compile", *arguments],
        capture_output=True,
        text=True,
        env={**inherited, "PYTHONPATH": path, **environment},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("target", "limit"), [("sm90", 232448), ("gfx942", 65536)])
def test_every_kind_of_failure_is_named(tmp_path: Path, target: str, limit: int) -> None:
    code, text = compile_check(tmp_path, target, "--package", "broken_kernels")
    assert code == 1
    failures = [line.removeprefix("FAILED ") for line in text.splitlines() if line.startswith("FAILED ")]
    assert not any(line.startswith("fits") for line in failures)
    assert any(line.startswith("too big: square spills ") for line in failures)
    assert any(line.startswith("too big: square needs ") and str(limit) in line for line in failures)
    assert not any(line.startswith("allowed to spill: square spills ") for line in failures)
    assert any(line.startswith("no power of two: does not compile: ValueError") for line in failures)
    assert "starts nothing: started no kernel" in failures


def test_limit_of_the_target_is_the_one_checked(tmp_path: Path) -> None:
    # 128 KiB of operands and results: within a block of gfx950, beyond one of gfx942
    _, text = compile_check(tmp_path, "gfx950", "--package", "broken_kernels", "--only", "allowed")
    assert "FAILED" not in text


def test_package_without_specimens_is_no_success(tmp_path: Path) -> None:
    code, text = compile_check(tmp_path, "sm80", "--package", "no_kernels")
    assert code == 1
    assert "no specimens for sm80 in no_kernels" in text


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["sm80"], {"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET=1 is set"),
        (["cpu"], {}, "not for cpu"),
        (["sm1"], {}, "unknown device 'sm1'"),
        (["sm80", "--package", "nowhere_at_all"], {}, "'nowhere_at_all' is not installed"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    code, text = compile_check(tmp_path, "--package", "broken_kernels", *arguments, **environment)
    assert code == 2, text
    assert message in text
    assert "Traceback" not in text
