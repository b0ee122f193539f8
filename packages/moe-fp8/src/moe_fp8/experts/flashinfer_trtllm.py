"""FlashInfer's TRTLLM kernels for FP8 weights on the sm_100 family.

There are three scale types: per tensor with static activations, block FP8 and MXFP8.
`moe_core.kernels.libraries.trtllm_experts` makes the call, `moe_core.kernels.libraries.trtllm_layout` defines the
layouts:

    per tensor  gate and up rows interleaved, shuffled for a tile of 128; sizes padded to multiples of 128
    block       up rows, then gate rows; shuffled for a tile of 64, in blocks of 128 columns; scales not shuffled
    MXFP8       gate and up rows interleaved, shuffled for a tile of 128, like their scales; N padded to 128, K to 256

In the per-tensor scheme gate and up keep separate scales: the library multiplies the gate by one factor before the
activation and the GEMM by the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from moe_core import (
    TRITON,
    KernelWeights,
    MoEActivation,
    MoEWeights,
    TensorError,
    WorkspaceSpec,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from moe_core.api.libraries import (
    TRTLLM_MAX_LOCAL_EXPERTS,
    TRTLLM_ROUTING_METHODS,
    TrtLlmExperts,
    TrtLlmRouted,
    TrtLlmRouting,
    mxfp8_input,
    mxfp8_workspaces,
    quantize_activation,
    swap_halves,
    trtllm_activation_parameters,
    trtllm_block_weights,
    trtllm_claims,
    trtllm_row_order,
    trtllm_scales,
    trtllm_weights,
)
from torch import Tensor

from moe_fp8.libraries import FLASHINFER

#: values of flashinfer.fused_moe.WeightLayout and Fp8QuantizationType
MAJOR_K, BLOCK_MAJOR_K = 0, 2
DEEP_SEEK_FP8, MX_FP8 = 1, 2

#: 1.0 as an e8m0 exponent
ONE = 127

_BLOCK_CLAIMS = trtllm_claims(
    keys=((kFp8Static128BlockSym, kFp8Dynamic128Sym),),
    hidden_multiple=128,
    intermediate_multiple=128,
    max_top_k=10,
    requires=(FLASHINFER, TRITON),
)
_TENSOR_CLAIMS = trtllm_claims(
    "x is quantized under the largest of the experts' input scales",
    keys=((kFp8StaticTensorSym, kFp8StaticTensorSym),),
    activations=frozenset({MoEActivation.SILU, MoEActivation.RELU2_NO_MUL}),
    activation_limit=False,
    hidden_multiple=128,
    requires=(FLASHINFER, TRITON),
)
_MXFP8_CLAIMS = trtllm_claims(
    keys=((kMxfp8Static, kMxfp8Dynamic),),
    activations=frozenset({MoEActivation.SILU, MoEActivation.SWIGLUOAI, MoEActivation.RELU2_NO_MUL}),
    hidden_multiple=32,
    intermediate_multiple=32,
    requires=(FLASHINFER, TRITON),
)


class TrtLlmFp8Experts(TrtLlmExperts):
    """Common base of the TRTLLM FP8 backends."""

    function = "trtllm_fp8_block_scale"

    @property
    def intermediate_size(self) -> int:
        return _round_up(self.config.intermediate_size, 128)

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        values = (num_tokens * self.hidden_size,)
        return WorkspaceSpec("x_values", values, torch.float8_e4m3fn), WorkspaceSpec("y", values, self.config.dtype)

    def activation_arguments(self) -> dict[str, Any]:
        """Return the activation argument, omitted for SILU, the library's default."""
        return {} if self.config.activation is MoEActivation.SILU else {"activation_type": self.activation_type}


class TrtLlmFp8TensorExperts(TrtLlmFp8Experts):
    """TRTLLM base for per-tensor scales (gate and up separate) and static activation scales."""

    function = "trtllm_fp8_per_tensor_scale"
    ungrouped = 0

    def requantized(self, weights: MoEWeights) -> MoEWeights:
        scale = weights.w13_input_scale
        if scale is None:
            return weights
        return replace(weights, w13_input_scale=scale.amax().expand_as(scale).contiguous())

    def convert(self, weights: MoEWeights) -> KernelWeights:
        weights = self.requantized(weights)
        w13_scale, w2_scale = weights.w13_scale, weights.w2_scale
        a1, a2 = weights.w13_input_scale, weights.w2_input_scale
        if w13_scale is None or w2_scale is None or a1 is None or a2 is None:
            raise TensorError(
                "w13_scale, w2_scale, w13_input_scale or w2_input_scale is missing: per-tensor FP8 needs all four"
            )
        gated, size, hidden = self.config.is_gated, self.intermediate_size, self.hidden_size
        parts = 2 if gated else 1
        order13, order2 = trtllm_row_order(parts * size, 128, gated=gated), trtllm_row_order(hidden, 128)
        first, second = w13_scale.float() * a1.float()[:, None], w2_scale[:, 0].float() * a2.float()
        return KernelWeights(
            w13=trtllm_weights(weights.w13, order13, size, hidden, parts=parts),
            w2=trtllm_weights(weights.w2, order2, hidden, size),
            quant_config=weights.quant_config(
                w1_scale=w13_scale.clone(), w2_scale=w2_scale.clone(), a1_scale=a1.clone(), a2_scale=a2.clone()
            ),
            extra={
                "x_scale": a1[:1].float().clone(),
                "output1_scales_gate_scalar": first[:, 0].contiguous(),
                "output1_scales_scalar": (first[:, 1] if gated else torch.ones_like(second)) / a2.float(),
                "output2_scales_scalar": second,
            },
        )

    def library_input(
        self, hidden_states: Tensor, weights: KernelWeights, workspace: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        x = workspace["x_values"][: hidden_states.numel()].view(hidden_states.shape)
        quantize_activation(hidden_states, kFp8StaticTensorSym, static_scale=weights.extra["x_scale"], out=x)
        return {"hidden_states": x}

    def weight_arguments(self, weights: KernelWeights) -> dict[str, Any]:
        factors = ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar")
        return {
            "gemm1_weights": weights.w13,
            "gemm2_weights": weights.w2,
            # the library would apply router weights only after x is quantized
            "use_routing_scales_on_input": False,
            **{name: weights.extra[name] for name in factors},
            **self.activation_arguments(),
        }


class TrtLlmFp8BlockExperts(TrtLlmFp8Experts):
    """TRTLLM base for 128×128 blocks with 1×128 groups."""

    ungrouped = 0

    def convert(self, weights: MoEWeights) -> KernelWeights:
        w13_scale, w2_scale = weights.weight_scales
        rows = weights.w13.shape[1]
        return KernelWeights(
            w13=trtllm_block_weights(weights.w13, trtllm_row_order(rows, 64, gated=True, in_turns=False)),
            w2=trtllm_block_weights(weights.w2, trtllm_row_order(self.hidden_size, 64)),
            quant_config=weights.quant_config(w1_scale=swap_halves(w13_scale), w2_scale=w2_scale.clone()),
            extra=trtllm_activation_parameters(self.config, weights.w13.shape[0], weights.w13.device),
        )

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        scales = WorkspaceSpec("x_scales", (num_tokens * self.hidden_size // 128,), torch.float32)
        return (*super().workspaces(num_tokens), scales)

    def library_input(
        self, hidden_states: Tensor, weights: KernelWeights, workspace: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        tokens, hidden = hidden_states.shape
        x = workspace["x_values"][: tokens * hidden].view(tokens, hidden)
        scale = workspace["x_scales"][: tokens * hidden // 128].view(hidden // 128, tokens)
        quantize_activation(hidden_states, kFp8Dynamic128Sym, out=x, scale_out=scale.t())
        return {"hidden_states": x, "hidden_states_scale": scale}

    def weight_arguments(self, weights: KernelWeights) -> dict[str, Any]:
        return {**_block_scale_arguments(weights, BLOCK_MAJOR_K, DEEP_SEEK_FP8), **self.activation_arguments()}


class TrtLlmMxfp8Experts(TrtLlmFp8Experts):
    """TRTLLM base for MXFP8 weights and activations."""

    @property
    def hidden_size(self) -> int:
        return _round_up(self.config.hidden_size, 256)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        s13, s2 = weights.weight_scales
        gated, size, hidden = self.config.is_gated, self.intermediate_size, self.hidden_size
        parts = 2 if gated else 1
        if (size, hidden) != (self.config.intermediate_size, self.config.hidden_size):
            s13, s2 = _padded_scales(s13, size, hidden // 32, parts), _padded_scales(s2, hidden, size // 32, 1)
        first, second = trtllm_row_order(parts * size, 128, gated=gated), trtllm_row_order(hidden, 128)
        return KernelWeights(
            w13=trtllm_weights(weights.w13, first, size, hidden, parts=parts),
            w2=trtllm_weights(weights.w2, second, hidden, size),
            quant_config=weights.quant_config(w1_scale=trtllm_scales(s13, first), w2_scale=trtllm_scales(s2, second)),
            extra=trtllm_activation_parameters(self.config, weights.w13.shape[0], weights.w13.device),
        )

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        y = WorkspaceSpec("y", (num_tokens * self.hidden_size,), self.config.dtype)
        return (*mxfp8_workspaces(num_tokens, self.hidden_size), y)

    def library_input(
        self, hidden_states: Tensor, weights: KernelWeights, workspace: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        x, scale = mxfp8_input(hidden_states, self.hidden_size, workspace)
        return {"hidden_states": x, "hidden_states_scale": scale}

    def library_output(self, output: Tensor, workspace: Mapping[str, Tensor]) -> Tensor:
        if self.hidden_size == self.config.hidden_size:
            return super().library_output(output, workspace)
        return workspace["y"][: output.shape[0] * self.hidden_size].view(-1, self.hidden_size)

    def weight_arguments(self, weights: KernelWeights) -> dict[str, Any]:
        return {**_block_scale_arguments(weights, MAJOR_K, MX_FP8), "activation_type": self.activation_type}


class TrtLlmFp8TensorExpertsMonolithic(TrtLlmRouting, TrtLlmFp8TensorExperts):
    """TRTLLM per-tensor FP8, called with router logits."""

    claims = replace(_TENSOR_CLAIMS, routing_methods=TRTLLM_ROUTING_METHODS)


class TrtLlmFp8BlockExpertsMonolithic(TrtLlmRouting, TrtLlmFp8BlockExperts):
    """TRTLLM block FP8, called with router logits."""

    claims = replace(_BLOCK_CLAIMS, routing_methods=TRTLLM_ROUTING_METHODS)


class TrtLlmMxfp8ExpertsMonolithic(TrtLlmRouting, TrtLlmMxfp8Experts):
    """TRTLLM MXFP8, called with router logits."""

    claims = replace(_MXFP8_CLAIMS, routing_methods=TRTLLM_ROUTING_METHODS)


class TrtLlmFp8TensorExpertsModular(TrtLlmRouted, TrtLlmFp8TensorExperts):
    """TRTLLM per-tensor FP8, called with expert ids and router weights."""

    claims = replace(_TENSOR_CLAIMS, max_experts=TRTLLM_MAX_LOCAL_EXPERTS)


class TrtLlmFp8BlockExpertsModular(TrtLlmRouted, TrtLlmFp8BlockExperts):
    """TRTLLM block FP8, called with expert ids and router weights."""

    claims = replace(_BLOCK_CLAIMS, max_experts=TRTLLM_MAX_LOCAL_EXPERTS)


class TrtLlmMxfp8ExpertsModular(TrtLlmRouted, TrtLlmMxfp8Experts):
    """TRTLLM MXFP8, called with expert ids and router weights."""

    claims = replace(_MXFP8_CLAIMS, max_experts=TRTLLM_MAX_LOCAL_EXPERTS)


def _block_scale_arguments(weights: KernelWeights, layout: int, kind: int) -> dict[str, Any]:
    """Return weights, scales and activation parameters of the block-scale functions."""
    quant = weights.quant_config
    return {
        "gemm1_weights": weights.w13,
        "gemm1_weights_scale": quant.w1_scale,
        "gemm2_weights": weights.w2,
        "gemm2_weights_scale": quant.w2_scale,
        "use_shuffled_weight": True,
        "weight_layout": layout,
        "fp8_quantization_type": kind,
        **weights.extra,
    }


def _padded_scales(scale: Tensor, rows: int, columns: int, parts: int) -> Tensor:
    """Pad e8m0 scales [E, parts * R, C] of each stacked matrix with scales of 1."""
    experts, height, width = scale.shape
    out = scale.new_full((experts, parts, rows, columns), ONE)
    out[:, :, : height // parts, :width] = scale.view(experts, parts, -1, width)
    return out.view(experts, parts * rows, columns)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
