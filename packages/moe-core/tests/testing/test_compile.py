"""The compile check finds what it must: where it compiles, in a process of its own, since this one interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from moe_core.testing.compile import main

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


def compile_check(folder: Path, *arguments: str) -> tuple[int, str]:
    (folder / "broken_kernels.py").write_text(SPECIMENS)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        # one process: the kernel of two specimens is compiled once
        [sys.executable, "-m", "moe_core.testing.compile", "--jobs", "1", *arguments],
        capture_output=True,
        text=True,
        env={**inherited, "PYTHONPATH": path},
    )
    return done.returncode, done.stdout + done.stderr


def test_every_kind_of_failure_is_named(tmp_path: Path) -> None:
    code, text = compile_check(tmp_path, "sm90", "gfx942", "gfx950", "--package", "broken_kernels")
    assert code == 1
    assert "Traceback" not in text
    failures = [line.removeprefix("FAILED ") for line in text.splitlines() if line.startswith("FAILED ")]
    for target, limit in (("sm90", 232448), ("gfx942", 65536)):
        assert not any(line.startswith(f"{target}: fits") for line in failures)
        assert any(line.startswith(f"{target}: too big: square spills ") for line in failures)
        assert any(line.startswith(f"{target}: too big: square needs ") and str(limit) in line for line in failures)
        assert not any(line.startswith(f"{target}: allowed to spill: square spills ") for line in failures)
        assert any(line.startswith(f"{target}: no power of two: does not compile: ValueError") for line in failures)
        assert f"{target}: starts nothing: started no kernel" in failures
        # the launch that does not compile is none of them
        assert f"{target}: 3 kernels of 5 specimens out of 5" in text
    # 128 KiB of operands and results are within a block of gfx950
    assert any(line.startswith("gfx950: no power of two") for line in failures)
    assert not any(line.startswith("gfx950: too big: square needs ") for line in failures)


def test_what_is_left_out_of_a_cover_is_said_and_failures_are_found(tmp_path: Path) -> None:
    code, text = compile_check(tmp_path, "sm90", "gfx950", "--package", "broken_kernels", "--cover", "1")
    assert code == 1
    failures = [line.removeprefix("FAILED ") for line in text.splitlines() if line.startswith("FAILED ")]
    # each of the three sizes for one of the targets; of two equal launches the one that may not spill
    assert sum("too big: square spills" in line for line in failures) == 1
    assert sum("no power of two: does not compile" in line for line in failures) == 1
    assert "sm90: starts nothing: started no kernel" in failures
    assert "gfx950: starts nothing: started no kernel" in failures
    assert "out of 5 (--cover 1)" in text
    compiled = [line for line in text.splitlines() if " square " in line and not line.startswith("FAILED")]
    assert len(compiled) <= 3
    assert {line.split()[0] for line in compiled} | {line.partition(":")[0] for line in failures} == {"sm90", "gfx950"}


def test_package_without_specimens_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no_kernels.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["sm80", "--package", "no_kernels", "--jobs", "1"]) == 1
    printed = capsys.readouterr()
    assert "nothing to compile for sm80 in no_kernels: no backend of these claims it with kernels" in printed.err
    assert "1 problem, " in printed.out


@pytest.mark.parametrize(
    ("arguments", "interpret", "message"),
    [
        (["sm80"], "1", "TRITON_INTERPRET=1 is set"),
        (["cpu"], "", "not for cpu"),
        (["sm1"], "", "unknown device 'sm1'"),
        (["sm80", "--package", "nowhere_at_all"], "", "'nowhere_at_all' is not installed"),
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
