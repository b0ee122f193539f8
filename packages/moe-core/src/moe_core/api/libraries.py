"""What adapters of kernel libraries share, beside the names of :mod:`moe_core` itself.

An adapter is a subclass of :class:`moe_core.FusedMoEExpertsModular` or :class:`moe_core.FusedMoEExpertsMonolithic` that
calls a library.  Nothing here imports Triton or a library before it is called.  Names change their meaning, or go, with
a new major :data:`moe_core.INTERFACE_API` only.

**Around the call**, for libraries that compute a part of the layer: tokens in the order of their experts
(:func:`sort_pairs`, :func:`align_pairs` with whole blocks of rows per expert, :func:`gather_rows`), quantised
activations (:func:`mxfp8_input` also for kernels that take more columns than the layer has), the activation function,
and the weighted sum over top-k.

**Layouts**: the bytes of weights moved into another order, at the memory's speed.

**FlashInfer's CUTLASS kernels**: :class:`FlashInferCutlassExperts`, with :func:`cutlass_claims`.

**FlashInfer's TRTLLM kernels**: :class:`TrtLlmExperts`, with :func:`trtllm_claims`, and before it the base that says
whether the kernel computes the routing (:class:`TrtLlmRouting`) or is given it (:class:`TrtLlmRouted`); the order of
weights and scales, and the activation's parameters.
"""

from __future__ import annotations

from moe_core.kernels.libraries.flashinfer_cutlass import FlashInferCutlassExperts, cutlass_claims
from moe_core.kernels.libraries.mxfp8_input import mxfp8_input, mxfp8_workspaces
from moe_core.kernels.libraries.trtllm_activation import trtllm_activation_arguments, trtllm_activation_parameters
from moe_core.kernels.libraries.trtllm_experts import TrtLlmExperts, trtllm_claims
from moe_core.kernels.libraries.trtllm_layout import (
    trtllm_block_weights,
    trtllm_row_order,
    trtllm_scales,
    trtllm_weights,
)
from moe_core.kernels.libraries.trtllm_routing import (
    TRTLLM_MAX_LOCAL_EXPERTS,
    TRTLLM_ROUTING_METHODS,
    TrtLlmRouted,
    TrtLlmRouting,
    trtllm_given_routing,
)
from moe_core.kernels.ops.activation import fused_activation
from moe_core.kernels.ops.align import align_pairs, align_workspaces, aligned_rows
from moe_core.kernels.ops.layout import block_major, by_experts, interleave_halves, pad_matrices, swap_halves
from moe_core.kernels.ops.permute import gather_rows
from moe_core.kernels.ops.quantize import activate_and_quantize, quantize_activation
from moe_core.kernels.ops.reduce import reduce_pairs
from moe_core.kernels.ops.sort import sort_pairs, sort_workspaces

__all__ = [
    # around the call
    "activate_and_quantize",
    "align_pairs",
    "align_workspaces",
    "aligned_rows",
    "fused_activation",
    "gather_rows",
    "mxfp8_input",
    "mxfp8_workspaces",
    "quantize_activation",
    "reduce_pairs",
    "sort_pairs",
    "sort_workspaces",
    # layouts
    "block_major",
    "by_experts",
    "interleave_halves",
    "pad_matrices",
    "swap_halves",
    # FlashInfer's CUTLASS kernels
    "FlashInferCutlassExperts",
    "cutlass_claims",
    # FlashInfer's TRTLLM kernels
    "TRTLLM_MAX_LOCAL_EXPERTS",
    "TRTLLM_ROUTING_METHODS",
    "TrtLlmExperts",
    "TrtLlmRouted",
    "TrtLlmRouting",
    "trtllm_activation_arguments",
    "trtllm_activation_parameters",
    "trtllm_block_weights",
    "trtllm_claims",
    "trtllm_given_routing",
    "trtllm_row_order",
    "trtllm_scales",
    "trtllm_weights",
]
