"""FlashInfer's TRTLLM kernel for int4 weights in groups of 32 ("MXINT4") on the sm_100 family.

One call of the library does everything, in bfloat16: both products, activation, weighted sum, and the routing unless it
is given.  Its layout is that of `moe_core.libraries.trtllm_layout`:

- codes are signed; up and gate rows come in turns, shuffled for a tile of 128, in blocks of 128 bytes (256 columns)
- scales are bfloat16, and follow their rows into tiles of 128 rows and 4 columns
- N is padded with zeros to a multiple of 256

Router weights are bfloat16 inside the library.
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
    kInt4Static32,
    make_quant_config,
)
from moe_core.libraries_api import (
    TRTLLM_MAX_LOCAL_EXPERTS,
    TRTLLM_ROUTING_METHODS,
    TrtLlmRouting,
    block_major,
    by_experts,
    local_ids,
    pad_matrices,
    trtllm_activation_parameters,
    trtllm_given_routing,
    trtllm_row_order,
    trtllm_scales,
)
from torch import Tensor

from moe_wna16.libraries import FLASHINFER
from moe_wna16.libraries.signed import signed_int4

#: columns of a block of weights: 128 bytes
BLOCK = 256
#: columns that share a scale
GROUP = 32
#: bytes at whose multiples hidden states and output lie: the library reads and writes 16 bytes at a time
ALIGNMENT = 16

_GATED = frozenset({MoEActivation.SILU, MoEActivation.SWIGLUOAI})


_CLAIMS = Claims(
    devices=(cuda(min=100, max=109),),
    keys=((kInt4Static32, None),),
    activations=_GATED,
    activation_limit=_GATED,
    dtypes=frozenset({torch.bfloat16}),
    hidden_multiple=BLOCK,
    intermediate_multiple=GROUP,
    max_top_k=32,
    allocates=True,
    keeps_nan=False,
    requires=(FLASHINFER,),
    notes="calls are bound against FlashInfer's signatures, and layouts compared with its helpers; "
    "router weights are rounded to bfloat16",
)


class TrtLlmMxint4Experts(FusedMoEExperts):
    """Symmetric int4 weights in groups of 32 with bfloat16 scales: what both classes share."""

    @staticmethod
    def library() -> Any:
        """``flashinfer.fused_moe``, imported on first use."""
        FLASHINFER.load()
        return importlib.import_module("flashinfer.fused_moe")

    @property
    def intermediate_size(self) -> int:
        """Rows of gate (or up) as the library sees them."""
        return -(-self.config.intermediate_size // BLOCK) * BLOCK

    def convert(self, weights: MoEWeights) -> KernelWeights:
        w13_scale, w2_scale = weights.w13_scale, weights.w2_scale
        if w13_scale is None or w2_scale is None:
            raise TensorError(f"w13_scale and w2_scale are missing: the weights are {weights.weight_key}")
        size, hidden = self.intermediate_size, self.config.hidden_size
        if size != self.config.intermediate_size:
            w13_scale = pad_matrices(w13_scale, size, hidden // GROUP, parts=2)
            w2_scale = pad_matrices(w2_scale, hidden, size // GROUP)
        first, second = trtllm_row_order(2 * size, 128, gated=True), trtllm_row_order(hidden, 128)
        return KernelWeights(
            w13=_blocks(weights.w13, first, size, hidden, parts=2),
            w2=_blocks(weights.w2, second, hidden, size),
            quant_config=make_quant_config(
                weight_key=weights.weight_key,
                activation_key=None,
                w1_scale=trtllm_scales(w13_scale, first),
                w2_scale=trtllm_scales(w2_scale, second),
            ),
            extra=trtllm_activation_parameters(self.config, weights.w13.shape[0], weights.w13.device),
        )

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        values = (num_tokens * self.config.hidden_size,)
        return (WorkspaceSpec("x", values, torch.bfloat16), WorkspaceSpec("y", values, torch.bfloat16))

    def weight_arguments(self, weights: KernelWeights) -> dict[str, Any]:
        """Weights, scales, size and activation, by the library's names."""
        quant = weights.quant_config
        return {
            "gemm1_weights": weights.w13,
            "gemm1_weights_scale": quant.w1_scale,
            "gemm2_weights": weights.w2,
            "gemm2_weights_scale": quant.w2_scale,
            "intermediate_size": self.intermediate_size,
            # the library has no defaults for them
            **{name: weights.extra.get(name) for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")},
        }

    @contextlib.contextmanager
    def matrices(
        self, hidden_states: Tensor, output: Tensor, workspace: Mapping[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """Hidden states and output where the library can read and write them; the output is copied back."""
        x, y = hidden_states, output
        if not _is_aligned(x):
            x = workspace["x"][: x.numel()].view(x.shape).copy_(x)
        if not _is_aligned(y):
            y = workspace["y"][: y.numel()].view(y.shape)
        yield {"hidden_states": x, "output": y}
        if y is not output:
            output.copy_(y)


class TrtLlmMxint4ExpertsMonolithic(TrtLlmMxint4Experts, TrtLlmRouting):
    """A call with router logits."""

    claims = replace(_CLAIMS, routing_methods=TRTLLM_ROUTING_METHODS)

    def arguments(
        self,
        matrices: dict[str, Tensor],
        weights: KernelWeights,
        *,
        router_logits: Tensor,
        correction_bias: Tensor | None,
    ) -> dict[str, Any]:
        """Arguments of ``trtllm_mxint4_block_scale_moe``; looks at no value and needs no GPU."""
        return {
            **matrices,
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
        with self.matrices(hidden_states, output, workspace) as matrices:
            self.library().trtllm_mxint4_block_scale_moe(
                **self.arguments(matrices, weights, router_logits=logits, correction_bias=correction_bias)
            )
        self.finish(output, expert_map)


class TrtLlmMxint4ExpertsModular(TrtLlmMxint4Experts, FusedMoEExpertsModular):
    """A call with ids and router weights.

    The library has a second way of running this call, by the distribution of the tokens, in which parameters of the
    activation do not reach the kernel: layers that have any are left to the monolithic class.
    """

    claims = replace(
        _CLAIMS,
        activations=frozenset({MoEActivation.SILU}),
        activation_limit=False,
        max_experts=TRTLLM_MAX_LOCAL_EXPERTS,
        keeps_nan=False,
        requires=(FLASHINFER, TRITON),
    )

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        ids = WorkspaceSpec("ids", (num_tokens * self.config.top_k,), torch.int32)
        return (*super().workspaces(num_tokens), ids)

    def arguments(
        self, matrices: dict[str, Tensor], weights: KernelWeights, *, packed_routing: Tensor
    ) -> dict[str, Any]:
        """Arguments of ``trtllm_mxint4_block_scale_routed_moe``; looks at no value and needs no GPU.

        ``packed_routing`` [M, k] int32: the local expert above 16 bits of the router weight in bfloat16.
        """
        return {
            **matrices,
            **self.weight_arguments(weights),
            "topk_ids": packed_routing,
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
        packed = pack_routing(local_ids(topk_ids, local, ids, none=local, expert_map=expert_map), topk_weights)
        with self.matrices(hidden_states, output, workspace) as matrices:
            self.library().trtllm_mxint4_block_scale_routed_moe(
                **self.arguments(matrices, weights, packed_routing=packed)
            )


def pack_routing(ids: Tensor, weights: Tensor) -> Tensor:
    """``ids`` [M, k] int32, in place, as the library takes a routing: above the bits of ``weights`` in bfloat16."""
    bits = weights.bfloat16().view(torch.int16).to(torch.int32)
    return ids.bitwise_left_shift_(16).bitwise_or_(bits.bitwise_and_(0xFFFF))


def _is_aligned(rows: Tensor) -> bool:
    """Whether the library can read or write a matrix where it lies."""
    return rows.is_contiguous() and rows.data_ptr() % ALIGNMENT == 0


def _blocks(w: Tensor, order: Tensor, rows: int, cols: int, *, parts: int = 1) -> Tensor:
    """``w`` [E, parts * R, C / 2], codes of C columns, as the library reads it: [E, cols / 256, parts * rows, 128].

    Each of the stacked matrices is padded with zeros to ``rows`` x ``cols``.
    """
    index, height, width = order.to(w.device), parts * rows, cols // 2

    def step(given: Tensor, target: Tensor) -> None:
        # signed first: a code of zeros is 0 then
        values = signed_int4(given)
        if values.shape[1:] != (height, width):
            values = pad_matrices(values, rows, width, parts=parts)
        block_major(values, BLOCK // 2, index=index, out=target)

    return by_experts(step, w, w.new_empty(w.shape[0], cols // BLOCK, height, BLOCK // 2))
