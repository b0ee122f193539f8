"""INT8 mixture-of-experts for moe-core: W8A8, W8A16, W4A8; oracle, formats, expert kernels."""

from moe_int8.online import quantize_moe_weights
from moe_int8.oracle import (
    backend_to_kernel_cls,
    convert_to_int8_moe_kernel_format,
    convert_to_w4a8_int8_moe_kernel_format,
    get_priority_backends,
    make_int8_moe_kernel,
    make_int8_moe_quant_config,
    make_w4a8_int8_moe_kernel,
    make_w4a8_int8_moe_quant_config,
    map_int8_backend,
    select_int8_moe_backend,
    select_w4a8_int8_moe_backend,
)
from moe_int8.scheme import Int8MoeBackend

__version__ = "0.1.0"

__all__ = [
    "Int8MoeBackend",
    "backend_to_kernel_cls",
    "convert_to_int8_moe_kernel_format",
    "convert_to_w4a8_int8_moe_kernel_format",
    "get_priority_backends",
    "make_int8_moe_kernel",
    "make_int8_moe_quant_config",
    "make_w4a8_int8_moe_kernel",
    "make_w4a8_int8_moe_quant_config",
    "map_int8_backend",
    "quantize_moe_weights",
    "select_int8_moe_backend",
    "select_w4a8_int8_moe_backend",
]
