"""What forked processes compile is found on disk; in a process of its own, since this one interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import time

import torch
import triton
import triton.language as tl
from moe_core import DeviceInfo
from moe_core.cli._compile_pool import CompilePool
from moe_core.kernels.launch.compile_ahead import compile_in_threads, distinct
from moe_core.kernels.launch.launch import launch, record
from moe_core.kernels.launch.compile_target import Target, compiling_for
from moe_core.cli.terminal.signals import ending_quietly
from triton import knobs


@triton.jit
def double(x, n, B: tl.constexpr, PDL: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(x + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


def launches(block):
    with record() as found:
        launch(double, (1,), torch.empty(256, device="meta"), 3, B=block)
    return found


hits = []
knobs.compilation.listener = lambda **said: hits.append(said["cache_hit"])
# as in a command, whose signals raise
with ending_quietly() as ending:
    ending.imported()
    pool = CompilePool(launches, DeviceInfo.parse("sm90"), 2)
    # a block of 100 is no power of two
    assert pool.compile([64, 100, 128]) == [True, False, True]
    assert not hits, "nothing is compiled here"
    pool._pool.apply_async(time.sleep, (60,))
    time.sleep(0.5)
    pool.close()
with compiling_for(Target.parse("sm90")):
    kernels = compile_in_threads([*launches(64), *launches(100), *launches(128)], threads=2, ignore_errors=True)
assert [kernel is None for kernel in kernels] == [False, True, False]
assert hits == [True, True], hits
print("done")
"""


def test_what_processes_compile_is_found(tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(SCRIPT)
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment = inherited | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done"]
    assert "Traceback" not in done.stderr
