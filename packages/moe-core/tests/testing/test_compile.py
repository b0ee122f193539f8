"""The compile check finds what it must: where it compiles, in a process of its own, since this one interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from moe_core.testing.compile import main

EXAMPLES = '''
"""Kernels that fail in each of the ways that the check knows."""
import torch
import triton
import triton.language as tl

from moe_core.testing import Example


@triton.jit
def square(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    at = i[:, None] * B + i[None, :]
    product = tl.dot(tl.load(x + at), tl.load(y + at))
    tl.store(y + at, product.to(tl.bfloat16))


def examples(target):
    x = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    yield Example("fits", lambda: square[(1,)](x, x, B=32))
    yield Example("too big", lambda: square[(1,)](x, x, B=256))
    yield Example("as big", lambda: square[(1,)](x, x, B=256), max_spills=1 << 20)
    yield Example("allowed to spill", lambda: square[(1,)](x, x, B=128, num_warps=1), max_spills=1 << 20)
    yield Example("no power of two", lambda: square[(1,)](x, x, B=100))
    yield Example("starts nothing", lambda: None)
    yield Example("raises", lambda: x.reshape(7))
'''


def test_every_kind_of_failure_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken_kernels.py").write_text(EXAMPLES)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "moe_core.testing.compile", "sm90", "gfx950"]
    command += ["--package", "none", "--examples", "broken_kernels:examples"]
    environment = {**inherited, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    failures = [line.removeprefix("FAILED ") for line in done.stderr.splitlines() if line.startswith("FAILED ")]
    for target in ("sm90", "gfx950"):
        own = [line.removeprefix(f"{target}: ") for line in failures if line.startswith(target)]
        assert not any(line.startswith(("fits", "as big", "allowed to spill")) for line in own)
        # of two equal launches the one that may not spill
        assert any(line.startswith("too big: square spills ") for line in own)
        assert any(line.startswith("no power of two: square does not compile: ValueError") for line in own)
        assert "starts nothing: started no kernel" in own
        assert any(line.startswith("raises: cannot be launched: RuntimeError") for line in own)
        assert f"{target}: 4 of 4 kernels" in done.stdout
    # 128 KiB of operands and results are within a CTA of gfx950
    assert any(line.startswith("sm90: too big: square needs ") and "232448" in line for line in failures)
    assert not any(line.startswith("gfx950: too big: square needs ") for line in failures)


def test_a_package_without_kernels_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["sm80", "--package", "no_kernels", "--jobs", "1"]) == 1
    printed = capsys.readouterr()
    assert "sm80: nothing to compile" in printed.err
    assert "1 problem, " in printed.out


@pytest.mark.parametrize(
    ("arguments", "interpret", "message"),
    [
        (["sm80"], "1", "TRITON_INTERPRET=1 is set"),
        (["cpu"], "", "not for cpu"),
        (["sm1"], "", "unknown device 'sm1'"),
        (["sm80", "--examples", "nowhere_at_all:examples"], "", "nowhere_at_all"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    interpret: str,
    message: str,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
