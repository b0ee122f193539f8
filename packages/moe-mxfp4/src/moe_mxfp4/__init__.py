"""MXFP4 mixture-of-experts for moe-core: e2m1 weights in groups of 32.

Activations are 16-bit, MXFP8, FP8 or MXFP4.
"""

from moe_mxfp4.experts.flashinfer_trtllm import TrtLlmMxfp4ExpertsModular, TrtLlmMxfp4ExpertsMonolithic
from moe_mxfp4.online import quantize_moe_weights
from moe_mxfp4.oracle import (
    backend_to_kernel_cls,
    convert_to_mxfp4_moe_kernel_format,
    get_priority_backends,
    make_mxfp4_moe_kernel,
    make_mxfp4_moe_quant_config,
    map_mxfp4_backend,
    mxfp4_round_up_hidden_size_and_intermediate_size,
    select_mxfp4_moe_backend,
)
from moe_mxfp4.scheme import Mxfp4MoeBackend

__version__ = "0.1.0"

__all__ = [
    "Mxfp4MoeBackend",
    "TrtLlmMxfp4ExpertsModular",
    "TrtLlmMxfp4ExpertsMonolithic",
    "backend_to_kernel_cls",
    "convert_to_mxfp4_moe_kernel_format",
    "get_priority_backends",
    "make_mxfp4_moe_kernel",
    "make_mxfp4_moe_quant_config",
    "map_mxfp4_backend",
    "mxfp4_round_up_hidden_size_and_intermediate_size",
    "quantize_moe_weights",
    "select_mxfp4_moe_backend",
]
