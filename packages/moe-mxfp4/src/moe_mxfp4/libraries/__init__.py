"""Requirements and layouts of the kernel-library adapters. Imports no library."""

from __future__ import annotations

from moe_core import Requirement

FLASHINFER = Requirement("flashinfer", "flashinfer-python", "0.7.2", "moe-mxfp4[flashinfer]")
#: OpenAI's package, recognized by a module that the same-named package on package indexes lacks; vLLM's wheel vendors a
#: copy. Later releases have neither `routing` nor the calls that depend on it.
TRITON_KERNELS = Requirement(
    "triton_kernels.routing",
    "triton_kernels",
    "1.0",
    "triton_kernels @ git+https://github.com/triton-lang/triton@v3.5.1#subdirectory=python/triton_kernels",
    copies=("vllm.third_party.triton_kernels.routing",),
)
