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

#: of kernels that may run beside the launch before them
BESIDE = '''
"""Kernels that wait for the launch before them in time, too late and never."""
from functools import partial

import torch
import triton
import triton.language as tl

from moe_core.kernels.device.pdl import begin_pdl, wait_at_first
from moe_core.testing.compile import Specimen


@triton.jit
def in_time(x, y, n):
    begin_pdl(True)
    i = tl.arange(0, 128)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def too_late(x, y, n):
    i = tl.arange(0, 128)
    value = tl.load(x + i, mask=i < n)
    begin_pdl(True)
    tl.store(y + i, value, mask=i < n)


@triton.jit
def never(x, y, n):
    i = tl.arange(0, 128)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def one_waits(x, y, n):
    if tl.load(n) == 0:
        wait_at_first(True)
        tl.store(y + tl.program_id(0), 1.0)
        return
    begin_pdl(True)
    tl.store(y + tl.program_id(0), tl.load(x))


@triton.jit
def reduce_kernel(ids, expert_map, y):
    expert = tl.load(expert_map[0] + tl.load(ids))
    begin_pdl(True)
    tl.store(y + expert, tl.load(y) + 1)


@triton.jit
def gemv_kernel(row_args, b_args, result, x, SECOND: tl.constexpr):
    i = tl.arange(0, 128)
    expert = tl.load(row_args[0])
    if expert < 0:
        wait_at_first(True)
        tl.store(result[0] + i, (i * 0).to(tl.float32))
        return
    weight = tl.load(b_args[0] + expert * b_args[1] + i)
    begin_pdl(True)
    tl.store(result[0] + i, weight * tl.load(x + i))


def specimens(device):
    x = torch.empty(256, device="meta")
    ids = torch.empty(256, dtype=torch.int32, device="meta")
    for kernel in (in_time, too_late, never):
        yield Specimen(kernel.__name__, partial(kernel[(1,)], x, x, 99, launch_pdl=True))
    yield Specimen("not beside", partial(never[(1,)], x, x, 99))
    yield Specimen("one waits", partial(one_waits[(1,)], x, x, ids, launch_pdl=True))
    yield Specimen("allowed", partial(reduce_kernel[(1,)], ids, (ids,), x, launch_pdl=True))
    for second in (True, False):
        arguments = ((ids,), (x, 33), (x, 3), x, second)
        yield Specimen(f"gemm{1 + second}", partial(gemv_kernel[(1,)], *arguments, launch_pdl=True))
'''


def compile_check(folder: Path, *arguments: str, specimens: str = SPECIMENS) -> tuple[int, str]:
    (folder / "broken_kernels.py").write_text(specimens)
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


def test_a_kernel_waits_for_the_launch_before_it_in_time(tmp_path: Path) -> None:
    code, text = compile_check(tmp_path, "sm90", "--package", "broken_kernels", specimens=BESIDE)
    assert code == 1
    assert "Traceback" not in text
    failures = [line.removeprefix("FAILED sm90: ") for line in text.splitlines() if line.startswith("FAILED ")]
    late = "touches memory before it has waited for the launch before it:"
    allowed = "; moe_core.testing.early_access.ALLOWED has what may be there"
    routing_and_weights = "ld.global.b32 of row_args, ld.global.b32 of b_args"
    helper = "moe_core.kernels.device.pdl.begin_pdl"
    assert failures == [
        f"too_late: too_late {late} ld.global.b32 of x{allowed}",
        f"never: never may run beside the launch before it, and never waits for it: {helper}",
        f"one waits: one_waits {late} ld.global.b32 of n, st.global.b32 of y{allowed}",
        f"gemm1: gemv_kernel {late} {routing_and_weights}, st.global.b32 of result{allowed}",
    ]
    assert "sm90: 8 kernels of 8 specimens out of 8" in text


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
