"""What a GPU's machine does up to the first call: vLLM's platform is CUDA there, which takes a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import vllm

ROOT = Path(__file__).resolve().parents[4]


def test_the_benchmark_without_a_gpu() -> None:
    """Every kind's layer is made, filled and converted for an H200."""
    program = [sys.executable, str(ROOT / "benchmarks" / "engine_vllm.py"), "--dry"]
    files = Path(vllm.__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_TARGET_DEVICE"}
    done = subprocess.run([*program, "--vllm", str(files)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    backends = {
        "fp8_block": "triton (TritonFp8BlockExperts)",
        "fp8_channel": "triton (TritonFp8Experts)",
        "int8_channel": "triton (TritonInt8Experts)",
        "int4_g128": "marlin (MarlinWNA16Experts)",
        "mxfp4": "marlin (MarlinMxfp4Experts)",
    }
    for kind, backend in backends.items():
        assert f"{kind}: moe_vllm {backend}, moe_core {backend}" in lines
