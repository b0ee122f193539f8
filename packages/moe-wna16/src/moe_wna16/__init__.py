"""WNA16 mixture-of-experts for moe-core: grouped INT4 and INT8 weights.

Activations are 16-bit or e4m3.
"""

from moe_wna16.online import quantize_moe_weights
from moe_wna16.oracle import (
    backend_to_kernel_cls,
    convert_to_wna16_moe_kernel_format,
    get_priority_backends,
    make_wna16_moe_kernel,
    make_wna16_moe_quant_config,
    map_wna16_backend,
    select_wna16_moe_backend,
)
from moe_wna16.scheme import WNA16MoEBackend

__version__ = "0.1.0"

__all__ = [
    "WNA16MoEBackend",
    "backend_to_kernel_cls",
    "convert_to_wna16_moe_kernel_format",
    "get_priority_backends",
    "make_wna16_moe_kernel",
    "make_wna16_moe_quant_config",
    "map_wna16_backend",
    "quantize_moe_weights",
    "select_wna16_moe_backend",
]
