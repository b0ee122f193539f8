"""Shared parts of the library adapters: requirements, layouts, requantization; imports none."""

from __future__ import annotations

from moe_core import Requirement

FLASHINFER = Requirement("flashinfer", "flashinfer-python", "0.7.2", "moe-fp8[flashinfer]")
#: vLLM's wheel vendors a copy
DEEP_GEMM = Requirement(
    "deep_gemm",
    "deep_gemm",
    "2.1",
    "deep_gemm @ git+https://github.com/deepseek-ai/DeepGEMM",
    copies=("vllm.third_party.deep_gemm",),
)
