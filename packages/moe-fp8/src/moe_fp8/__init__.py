"""FP8 and MXFP8 mixture-of-experts for moe-core: oracle, checkpoint formats, expert kernels."""

from moe_fp8.methods import Fp8OnlineMoEMethod, ModelOptMxfp8MoEMethod
from moe_fp8.online import quantize_moe_weights
from moe_fp8.oracle import (
    backend_to_kernel_cls,
    convert_to_fp8_moe_kernel_format,
    get_priority_backends,
    make_fp8_moe_kernel,
    make_fp8_moe_quant_config,
    map_fp8_backend,
    select_fp8_moe_backend,
    select_mxfp8_moe_backend,
)
from moe_fp8.scheme import Fp8MoeBackend

__version__ = "0.1.0"

__all__ = [
    "Fp8MoeBackend",
    "Fp8OnlineMoEMethod",
    "ModelOptMxfp8MoEMethod",
    "backend_to_kernel_cls",
    "convert_to_fp8_moe_kernel_format",
    "get_priority_backends",
    "make_fp8_moe_kernel",
    "make_fp8_moe_quant_config",
    "map_fp8_backend",
    "quantize_moe_weights",
    "select_fp8_moe_backend",
    "select_mxfp8_moe_backend",
]
