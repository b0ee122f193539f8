"""FlashInfer's TRTLLM kernels for MXFP4 weights on the sm_100 family, with bfloat16 or MXFP8 activations.

One call of the library does everything in bfloat16: both products, activation, weighted sum, and the routing unless it
is given.  Its layout is that of `moe_core.libraries.trtllm_layout`:

- up and gate rows come in turns, shuffled for a tile of 128; float32 biases lie as their rows do
- scales follow their rows into tiles of 128 rows and 4 columns
- K is padded with zeros to a multiple of 256, N to one of 128; the output is as narrow as the layer

MXFP8: x is quantised before the call, the activated values inside it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from moe_core import (
    TRITON,
    Claims,
    ExpertTokensMetadata,
    FusedMoEExperts,
    FusedMoEExpertsModular,
    KernelWeights,
    MoEActivation,
    MoEWeights,
    TensorError,
    WorkspaceSpec,
    cuda,
    kMxfp4Static,
    kMxfp8Dynamic,
    make_quant_config,
)
from moe_core.libraries_api import (
    TRTLLM_MAX_LOCAL_EXPERTS,
    TRTLLM_ROUTING_METHODS,
    TrtLlmRouting,
    local_ids,
    pad_matrices,
    trtllm_activation_parameters,
    trtllm_given_routing,
    trtllm_row_order,
    trtllm_scales,
    trtllm_weights,
)
from torch import Tensor

from moe_mxfp4.groups import GROUP
from moe_mxfp4.libraries import FLASHINFER
from moe_mxfp4.libraries.mxfp8_input import mxfp8_input, mxfp8_workspaces
from moe_mxfp4.padding import PaddedExperts, round_up

#: value of flashinfer.tllm_enums.ActivationType for all gated SiLU activations
SWIGLU = 3
#: value of flashinfer.tllm_enums.SfLayout: scales of x lie row by row
LAYOUT_LINEAR = 2
#: bytes at whose multiples hidden states and output lie: the library reads and writes 16 bytes at a time
ALIGNMENT = 16

_GATED = frozenset({MoEActivation.SILU, MoEActivation.SWIGLUOAI})
_CLAIMS = Claims(
    devices=(cuda(min=100, max=109),),
    keys=((kMxfp4Static, None), (kMxfp4Static, kMxfp8Dynamic)),
    activations=_GATED,
    activation_limit=_GATED,
    dtypes=frozenset({torch.bfloat16}),
    bias=True,
    hidden_multiple=GROUP,
    intermediate_multiple=GROUP,
    max_top_k=32,
    allocates=True,
    keeps_nan=False,
    requires=(FLASHINFER, TRITON),
    notes="calls are bound against FlashInfer's signatures, and layouts compared with its helpers",
)


class TrtLlmMxfp4Experts(FusedMoEExperts, PaddedExperts):
    """What both classes share."""

    @classmethod
    def padded_sizes(cls, hidden_size: int, intermediate_size: int) -> tuple[int, int]:
        return round_up(hidden_size, 256), round_up(intermediate_size, 128)

    @staticmethod
    def library() -> Any:
        """``flashinfer.fused_moe``, imported on first use."""
        FLASHINFER.load()
        return importlib.import_module("flashinfer.fused_moe")

    @property
    def sizes(self) -> tuple[int, int]:
        """(K, N) as the library sees them."""
        return self.padded_sizes(self.config.hidden_size, self.config.intermediate_size)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        w13_scale, w2_scale = weights.w13_scale, weights.w2_scale
        if w13_scale is None or w2_scale is None:
            raise TensorError(f"w13_scale and w2_scale are missing: the weights are {weights.weight_key}")
        hidden, size = self.sizes
        first, second = trtllm_row_order(2 * size, 128, gated=True), trtllm_row_order(hidden, 128)
        biases: dict[str, Any] = {}
        if weights.w13_bias is not None and weights.w2_bias is not None:
            w13_bias, w2_bias = weights.w13_bias.float().unsqueeze(2), weights.w2_bias.float().unsqueeze(2)
            biases["w1_bias"] = trtllm_weights(w13_bias, first, size, 1, parts=2).squeeze(2)
            biases["w2_bias"] = trtllm_weights(w2_bias, second, hidden, 1).squeeze(2)
        return KernelWeights(
            w13=trtllm_weights(weights.w13, first, size, hidden // 2, parts=2),
            w2=trtllm_weights(weights.w2, second, hidden, size // 2),
            quant_config=make_quant_config(
                weight_key=weights.weight_key,
                activation_key=weights.activation_key,
                w1_scale=trtllm_scales(pad_matrices(w13_scale, size, hidden // GROUP, parts=2), first),
                w2_scale=trtllm_scales(pad_matrices(w2_scale, hidden, size // GROUP), second),
                **biases,
            ),
            extra=trtllm_activation_parameters(self.config, weights.w13.shape[0], weights.w13.device),
        )

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        hidden, _ = self.sizes
        y = WorkspaceSpec("y", (num_tokens * self.config.hidden_size,), torch.bfloat16)
        if self.activation_key is not None:
            return (*mxfp8_workspaces(num_tokens, hidden), y)
        return (WorkspaceSpec("x", (num_tokens * hidden,), torch.bfloat16), y)

    def weight_arguments(self, weights: KernelWeights) -> dict[str, Any]:
        """Weights, scales, biases, size and activation, by the library's names."""
        quant, extra = weights.quant_config, weights.extra
        if quant.w1_scale is None or quant.w2_scale is None:
            raise TensorError("the quant config of MXFP4 weights holds w1_scale and w2_scale")
        return {
            "gemm1_weights": weights.w13,
            # the library tells what scales are from how many there are; the dtype is that of all it knows
            "gemm1_weights_scale": quant.w1_scale.view(torch.float8_e4m3fn),
            "gemm1_bias": quant.w1_bias,
            "gemm2_weights": weights.w2,
            "gemm2_weights_scale": quant.w2_scale.view(torch.float8_e4m3fn),
            "gemm2_bias": quant.w2_bias,
            "intermediate_size": self.sizes[1],
            "activation_type": SWIGLU,
            # none of these has a default
            **{name: extra.get(name) for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")},
            "output1_scale_scalar": None,
            "output1_scale_gate_scalar": None,
            "output2_scale_scalar": None,
        }

    def library_input(self, hidden_states: Tensor, workspace: Mapping[str, Tensor]) -> dict[str, Any]:
        """x as the library takes it: its arguments ``hidden_states`` and ``hidden_states_scale``."""
        hidden, _ = self.sizes
        if self.activation_key is not None:
            x, scale = mxfp8_input(hidden_states, hidden, workspace)
            return {
                "hidden_states": x,
                "hidden_states_scale": scale.view(torch.float8_e4m3fn),
                "hidden_states_scale_layout": LAYOUT_LINEAR,
            }
        tokens, columns = hidden_states.shape
        x = hidden_states
        if hidden != columns or not _is_aligned(x):
            x = workspace["x"][: tokens * hidden].view(tokens, hidden)
            x[:, :columns].copy_(hidden_states)
            x[:, columns:].zero_()
        return {"hidden_states": x, "hidden_states_scale": None}

    @contextlib.contextmanager
    def tensors(
        self, hidden_states: Tensor, output: Tensor, workspace: Mapping[str, Tensor]
    ) -> Iterator[dict[str, Any]]:
        """Hidden states and output where the library can read and write them; the output is copied back."""
        y = output if _is_aligned(output) else workspace["y"][: output.numel()].view(output.shape)
        yield {**self.library_input(hidden_states, workspace), "output": y}
        if y is not output:
            output.copy_(y)


class TrtLlmMxfp4ExpertsMonolithic(TrtLlmMxfp4Experts, TrtLlmRouting):
    """A call with router logits."""

    claims = replace(
        _CLAIMS,
        routing_methods=TRTLLM_ROUTING_METHODS,
        notes=f"{_CLAIMS.notes}; router weights are rounded to bfloat16",
    )

    def arguments(
        self,
        tensors: dict[str, Any],
        weights: KernelWeights,
        *,
        router_logits: Tensor,
        correction_bias: Tensor | None,
    ) -> dict[str, Any]:
        """Arguments of ``trtllm_fp4_block_scale_moe``; looks at no value and needs no GPU."""
        return {
            **tensors,
            **self.weight_arguments(weights),
            **self.routing_arguments(router_logits, correction_bias, ungrouped=None),
        }

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weights: KernelWeights,
        *,
        router_logits: Tensor,
        workspace: Mapping[str, Tensor],
        correction_bias: Tensor | None = None,
        expert_map: Tensor | None = None,
        hidden_states_scale: Tensor | None = None,
    ) -> None:
        logits = self.library_logits(router_logits)
        with self.tensors(hidden_states, output, workspace) as tensors:
            self.library().trtllm_fp4_block_scale_moe(
                **self.arguments(tensors, weights, router_logits=logits, correction_bias=correction_bias)
            )
        self.finish(output, expert_map)


class TrtLlmMxfp4ExpertsModular(TrtLlmMxfp4Experts, FusedMoEExpertsModular):
    """A call with ids and router weights."""

    claims = replace(_CLAIMS, max_experts=TRTLLM_MAX_LOCAL_EXPERTS)

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        ids = WorkspaceSpec("ids", (num_tokens * self.config.top_k,), torch.int32)
        return (*super().workspaces(num_tokens), ids)

    def arguments(
        self, tensors: dict[str, Any], weights: KernelWeights, *, topk_weights: Tensor, local_ids: Tensor
    ) -> dict[str, Any]:
        """Arguments of ``trtllm_fp4_block_scale_routed_moe``; looks at no value and needs no GPU."""
        return {
            **tensors,
            **self.weight_arguments(weights),
            "topk_ids": (local_ids, topk_weights),
            "routing_bias": None,
            **trtllm_given_routing(self.config),
        }

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weights: KernelWeights,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        workspace: Mapping[str, Tensor],
        expert_map: Tensor | None = None,
        hidden_states_scale: Tensor | None = None,
        expert_tokens: ExpertTokensMetadata | None = None,
    ) -> None:
        ids = workspace["ids"][: topk_ids.numel()].view(topk_ids.shape)
        local = self.config.local_experts
        local_ids(topk_ids, local, ids, none=local, expert_map=expert_map)
        with self.tensors(hidden_states, output, workspace) as tensors:
            self.library().trtllm_fp4_block_scale_routed_moe(
                **self.arguments(tensors, weights, topk_weights=topk_weights, local_ids=ids)
            )


def _is_aligned(rows: Tensor) -> bool:
    """Whether the library can read or write a matrix where it lies."""
    return rows.is_contiguous() and rows.data_ptr() % ALIGNMENT == 0
