"""What the adapters of kernel libraries need: requirements, layouts.  Imports no library."""

from __future__ import annotations

from moe_core import Requirement

FLASHINFER = Requirement("flashinfer", "flashinfer-python", "0.7.2", "moe-mxfp4[flashinfer]")
#: OpenAI's, known by a module that the package of that name on package indexes has not; vLLM's wheel carries a copy.
#: Later releases of it have neither `routing` nor the calls that go with it.
TRITON_KERNELS = Requirement(
    "triton_kernels.routing",
    "triton_kernels",
    "1.0",
    "triton_kernels @ git+https://github.com/triton-lang/triton@v3.5.1#subdirectory=python/triton_kernels",
    copies=("vllm.third_party.triton_kernels.routing",),
)
