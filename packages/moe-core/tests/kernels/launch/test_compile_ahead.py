"""Kernels are compiled in threads, each once; in a process of its own, since this one interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
import triton
import triton.language as tl
from moe_core.kernels.launch.compile_ahead import compile_in_threads, distinct
from moe_core.kernels.launch.launch import launch, record
from moe_core.kernels.launch.compile_target import Target, compiling_for
from triton import knobs


@triton.jit
def double(x, n, B: tl.constexpr, PDL: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(x + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


def launches(*calls):
    x = torch.empty(256, device="meta")
    with record() as found:
        for n, block in calls:
            launch(double, (1,), x, n, B=block)
    return distinct(found)


compiled = []
knobs.runtime.jit_post_compile_hook = lambda **said: compiled.append(said["repr"])
good = launches((3, 64), (5, 64), (16, 64), (32, 128), (1, 64))
assert len(good) == 4, good
with compiling_for(Target.parse("sm90")):
    try:
        compile_in_threads(launches((3, 100)), threads=2)
    except Exception as error:
        print("raised", type(error).__name__)
    told = []
    kernels = compile_in_threads(good, progress=lambda *now: told.append(now), threads=2)
    assert sorted(told) == [(1, 4), (2, 4), (3, 4), (4, 4)], told
    assert all("cubin" in kernel.asm for kernel in kernels)
    assert len(compiled) == 4, compiled
    double[(1,)](torch.empty(256, device="meta"), 48, B=128, PDL=False, enable_fp_fusion=True)
    compile_in_threads(good, progress=lambda *now: told.append(now))
    assert told[-1] == (4, 4)
assert len(compiled) == 4, "what is compiled is not compiled again"
print("done")
"""


def test_each_kernel_is_compiled_once_and_an_error_is_raised(tmp_path: Path) -> None:
    script = tmp_path / "ahead.py"
    script.write_text(SCRIPT)
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment = inherited | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["raised", "CompilationError", "done"]
