"""vLLM's own Python on a machine without a GPU, so that its selection and its modular kernel run; it serves nothing."""

from __future__ import annotations

import moe_core_stand_ins

#: vLLM's parts that serve, which ask for hundreds of names of web and tokeniser packages, and compiled attention
PARTS = (
    "vllm.entrypoints",
    "vllm.parser",
    "vllm.reasoning",
    "vllm.renderers",
    "vllm.tool_parsers",
    "vllm.distributed.kv_transfer.kv_connector.v1",
    "vllm.vllm_flash_attn",
)
#: what vLLM asks for to find out whether it is there, in an `except ImportError`
OPTIONAL = (
    "aiter",
    "amdsmi",
    "b12x",
    "deep_ep",
    "deep_gemm",
    "flashinfer",
    "hpc",
    "humming",
    "intel_extension_for_pytorch",
    "libtpu",
    "moonep",
    "mori",
    "nixl_ep",
    "pplx_kernels",
    "tilelang",
    "torch",
    "torch_tpu",
    "torchao",
    "tpu_inference",
    "triton",
    "triton_kernels",
    "zentorch",
)


def install() -> None:
    """Once per process, before vLLM is imported."""
    moe_core_stand_ins.install("vllm", optional=OPTIONAL, parts=PARTS)
