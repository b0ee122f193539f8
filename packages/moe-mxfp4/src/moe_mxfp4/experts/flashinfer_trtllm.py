"""FlashInfer's TRTLLM kernels for MXFP4 weights on sm_100, bfloat16 or MXFP8 activations.

`moe_core.kernels.libraries.trtllm_experts` makes the call, `moe_core.kernels.libraries.trtllm_layout` defines the
layout:

- Up and gate rows are interleaved and shuffled for a tile of 128; float32 biases follow the same order.
- Scales follow the rows, in tiles of 128 rows and 4 columns.
- K is zero-padded to a multiple of 256, N to a multiple of 128; the output has the layer's width.

With MXFP8 activations, x is quantized before the call and the activated values inside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from moe_core import (
    TRITON,
    KernelWeights,
    MoEWeights,
    WorkspaceSpec,
    kMxfp4Static,
    kMxfp8Dynamic,
)
from moe_core.api.libraries import (
    TRTLLM_MAX_LOCAL_EXPERTS,
    TRTLLM_ROUTING_METHODS,
    TrtLlmExperts,
    TrtLlmRouted,
    TrtLlmRouting,
    mxfp8_input,
    mxfp8_workspaces,
    pad_matrices,
    trtllm_activation_arguments,
    trtllm_activation_parameters,
    trtllm_claims,
    trtllm_row_order,
    trtllm_scales,
    trtllm_weights,
)
from torch import Tensor

from moe_mxfp4.groups import GROUP
from moe_mxfp4.libraries import FLASHINFER
from moe_mxfp4.padding import PaddedExperts, round_up

#: value of flashinfer.tllm_enums.SfLayout: scales of x are row-major
LAYOUT_LINEAR = 2

_CLAIMS = trtllm_claims(
    keys=((kMxfp4Static, None), (kMxfp4Static, kMxfp8Dynamic)),
    bias=True,
    hidden_multiple=GROUP,
    intermediate_multiple=GROUP,
    requires=(FLASHINFER, TRITON),
)


class TrtLlmMxfp4Experts(PaddedExperts, TrtLlmExperts):
    """Shared base of both TRTLLM MXFP4 backends."""

    function = "trtllm_fp4_block_scale"

    @classmethod
    def padded_sizes(cls, hidden_size: int, intermediate_size: int) -> tuple[int, int]:
        return round_up(hidden_size, 256), round_up(intermediate_size, 128)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        w13_scale, w2_scale = weights.weight_scales
        hidden, size = self.hidden_size, self.intermediate_size
        first, second = trtllm_row_order(2 * size, 128, gated=True), trtllm_row_order(hidden, 128)
        biases: dict[str, Any] = {}
        if weights.w13_bias is not None and weights.w2_bias is not None:
            w13_bias, w2_bias = weights.w13_bias.float().unsqueeze(2), weights.w2_bias.float().unsqueeze(2)
            biases["w1_bias"] = trtllm_weights(w13_bias, first, size, 1, parts=2).squeeze(2)
            biases["w2_bias"] = trtllm_weights(w2_bias, second, hidden, 1).squeeze(2)
        return KernelWeights(
            w13=trtllm_weights(weights.w13, first, size, hidden // 2, parts=2),
            w2=trtllm_weights(weights.w2, second, hidden, size // 2),
            quant_config=weights.quant_config(
                w1_scale=trtllm_scales(pad_matrices(w13_scale, size, hidden // GROUP, parts=2), first),
                w2_scale=trtllm_scales(pad_matrices(w2_scale, hidden, size // GROUP), second),
                **biases,
            ),
            extra=trtllm_activation_parameters(self.config, weights.w13.shape[0], weights.w13.device),
        )

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        x, y = super().workspaces(num_tokens)
        return (x, y) if self.activation_key is None else (*mxfp8_workspaces(num_tokens, self.hidden_size), y)

    def weight_arguments(self, weights: KernelWeights) -> dict[str, Any]:
        quant = weights.quant_config
        w13_scale, w2_scale = quant.weight_scales
        return {
            "gemm1_weights": weights.w13,
            # the library infers the type of scales from their number; it expects this dtype for all types
            "gemm1_weights_scale": w13_scale.view(torch.float8_e4m3fn),
            "gemm1_bias": quant.w1_bias,
            "gemm2_weights": weights.w2,
            "gemm2_weights_scale": w2_scale.view(torch.float8_e4m3fn),
            "gemm2_bias": quant.w2_bias,
            "activation_type": self.activation_type,
            # these arguments have no defaults
            **trtllm_activation_arguments(weights.extra),
            "output1_scale_scalar": None,
            "output1_scale_gate_scalar": None,
            "output2_scale_scalar": None,
        }

    def library_input(
        self, hidden_states: Tensor, weights: KernelWeights, workspace: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        if self.activation_key is None:
            return {**super().library_input(hidden_states, weights, workspace), "hidden_states_scale": None}
        x, scale = mxfp8_input(hidden_states, self.hidden_size, workspace)
        return {
            "hidden_states": x,
            "hidden_states_scale": scale.view(torch.float8_e4m3fn),
            "hidden_states_scale_layout": LAYOUT_LINEAR,
        }


class TrtLlmMxfp4ExpertsMonolithic(TrtLlmRouting, TrtLlmMxfp4Experts):
    """TRTLLM MXFP4, called with router logits."""

    claims = replace(
        _CLAIMS,
        routing_methods=TRTLLM_ROUTING_METHODS,
        notes=f"{_CLAIMS.notes}; router weights are rounded to bfloat16",
    )


class TrtLlmMxfp4ExpertsModular(TrtLlmRouted, TrtLlmMxfp4Experts):
    """TRTLLM MXFP4, called with expert ids and router weights."""

    claims = replace(_CLAIMS, max_experts=TRTLLM_MAX_LOCAL_EXPERTS)
