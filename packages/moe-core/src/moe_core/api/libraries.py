"""Shared code for adapters of kernel libraries, in addition to the names of :mod:`moe_core`.

An adapter is a subclass of :class:`moe_core.FusedMoEExpertsModular` or :class:`moe_core.FusedMoEExpertsMonolithic` that
calls a library. Nothing here imports Triton or a library before it is called. Names change meaning or are removed only
with a new major version of :data:`moe_core.INTERFACE_API`.

**Around the call**, for libraries that compute only a part of the layer: tokens sorted by expert (:func:`sort_pairs`,
:func:`align_pairs` with whole blocks of rows per expert, :func:`gather_rows`), activation quantization
(:func:`mxfp8_input` also for kernels that take more columns than the layer has), the activation function, and the
weighted sum over top-k.

**Layouts**: reorder the bytes of weights at memory bandwidth.

**FlashInfer's CUTLASS kernels**: :class:`FlashInferCutlassExperts`, with :func:`cutlass_claims`.

**FlashInfer's TRTLLM kernels**: :class:`TrtLlmExperts`, with :func:`trtllm_claims`. The base before it in a class
statement determines whether the kernel computes the routing (:class:`TrtLlmRouting`) or receives it
(:class:`TrtLlmRouted`). Further helpers order weights and scales and derive the activation's parameters.
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
    # Around the call.
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
    # Layouts.
    "block_major",
    "by_experts",
    "interleave_halves",
    "pad_matrices",
    "swap_halves",
    # FlashInfer's CUTLASS kernels.
    "FlashInferCutlassExperts",
    "cutlass_claims",
    # FlashInfer's TRTLLM kernels.
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
