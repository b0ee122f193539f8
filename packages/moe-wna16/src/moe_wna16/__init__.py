"""WNA16 mixture-of-experts for moe-core: INT4 and INT8 weights in groups, with 16-bit or e4m3 activations."""

from moe_wna16.online import quantize_moe_weights
from moe_wna16.oracle import (
    WNA16MoEBackend,
    WNA16Oracle,
    convert_to_wna16_moe_kernel_format,
    make_wna16_moe_kernel,
    make_wna16_moe_quant_config,
    select_wna16_moe_backend,
)

__version__ = "0.1.0"

__all__ = [
    "WNA16MoEBackend",
    "WNA16Oracle",
    "convert_to_wna16_moe_kernel_format",
    "make_wna16_moe_kernel",
    "make_wna16_moe_quant_config",
    "quantize_moe_weights",
    "select_wna16_moe_backend",
]
