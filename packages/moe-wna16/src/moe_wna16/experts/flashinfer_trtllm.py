"""FlashInfer's TRTLLM kernel for int4 in groups of 32 ("MXINT4") on the sm_100 family.

`moe_core.kernels.libraries.trtllm_experts` makes the call, `moe_core.kernels.libraries.trtllm_layout` defines the
layout:

- Codes are signed. Up and gate rows are interleaved and shuffled for a tile of 128, in blocks of 128 bytes (256
  columns).
- Scales are bfloat16 and follow the rows, in tiles of 128 rows and 4 columns.
- N is zero-padded to a multiple of 256.

The library uses bfloat16 router weights internally.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from moe_core import (
    TRITON,
    KernelWeights,
    MoEActivation,
    MoEWeights,
    kInt4Static32,
)
from moe_core.api.libraries import (
    TRTLLM_MAX_LOCAL_EXPERTS,
    TRTLLM_ROUTING_METHODS,
    TrtLlmExperts,
    TrtLlmRouted,
    TrtLlmRouting,
    block_major,
    by_experts,
    pad_matrices,
    trtllm_activation_arguments,
    trtllm_activation_parameters,
    trtllm_claims,
    trtllm_given_routing,
    trtllm_row_order,
    trtllm_scales,
)
from torch import Tensor

from moe_wna16.libraries import FLASHINFER
from moe_wna16.libraries.signed import signed_int4

#: columns of a weight block: 128 bytes
BLOCK = 256
#: columns that share a scale
GROUP = 32

_CLAIMS = trtllm_claims(
    "router weights are rounded to bfloat16",
    keys=((kInt4Static32, None),),
    hidden_multiple=BLOCK,
    intermediate_multiple=GROUP,
    requires=(FLASHINFER,),
)


class TrtLlmMxint4Experts(TrtLlmExperts):
    """Shared base for symmetric int4 weights in groups of 32 with bfloat16 scales."""

    function = "trtllm_mxint4_block_scale"

    @property
    def intermediate_size(self) -> int:
        return -(-self.config.intermediate_size // BLOCK) * BLOCK

    def convert(self, weights: MoEWeights) -> KernelWeights:
        w13_scale, w2_scale = weights.weight_scales
        size, hidden = self.intermediate_size, self.config.hidden_size
        if size != self.config.intermediate_size:
            w13_scale = pad_matrices(w13_scale, size, hidden // GROUP, parts=2)
            w2_scale = pad_matrices(w2_scale, hidden, size // GROUP)
        first, second = trtllm_row_order(2 * size, 128, gated=True), trtllm_row_order(hidden, 128)
        return KernelWeights(
            w13=_blocks(weights.w13, first, size, hidden, parts=2),
            w2=_blocks(weights.w2, second, hidden, size),
            quant_config=weights.quant_config(
                w1_scale=trtllm_scales(w13_scale, first), w2_scale=trtllm_scales(w2_scale, second)
            ),
            extra=trtllm_activation_parameters(self.config, weights.w13.shape[0], weights.w13.device),
        )

    def weight_arguments(self, weights: KernelWeights) -> dict[str, Any]:
        quant = weights.quant_config
        return {
            "gemm1_weights": weights.w13,
            "gemm1_weights_scale": quant.w1_scale,
            "gemm2_weights": weights.w2,
            "gemm2_weights_scale": quant.w2_scale,
            # these arguments have no defaults
            **trtllm_activation_arguments(weights.extra),
        }


class TrtLlmMxint4ExpertsMonolithic(TrtLlmRouting, TrtLlmMxint4Experts):
    """TRTLLM MXINT4, called with router logits."""

    claims = replace(_CLAIMS, routing_methods=TRTLLM_ROUTING_METHODS)


class TrtLlmMxint4ExpertsModular(TrtLlmRouted, TrtLlmMxint4Experts):
    """TRTLLM MXINT4, called with expert ids and router weights.

    For some token distributions the library runs this call in another way, in which the activation's parameters do not
    reach the kernel. Layers with such parameters are left to the monolithic class.
    """

    claims = replace(
        _CLAIMS,
        activations=frozenset({MoEActivation.SILU}),
        activation_limit=False,
        max_experts=TRTLLM_MAX_LOCAL_EXPERTS,
        requires=(FLASHINFER, TRITON),
    )

    def routing_arguments(self, topk_weights: Tensor, ids: Tensor) -> dict[str, Any]:
        return {**trtllm_given_routing(self.config), "topk_ids": pack_routing(ids, topk_weights)}


def pack_routing(ids: Tensor, weights: Tensor) -> Tensor:
    """Pack expert ids and router weights into the library's routing format, in place.

    Args:
        ids: int32 [M, k], overwritten.
        weights: router weights [M, k].

    Returns:
        ``ids`` with the id in the upper 16 bits and the bfloat16 weight in the lower ones.
    """
    bits = weights.bfloat16().view(torch.int16).to(torch.int32)
    return ids.bitwise_left_shift_(16).bitwise_or_(bits.bitwise_and_(0xFFFF))


def _blocks(w: Tensor, order: Tensor, rows: int, cols: int, *, parts: int = 1) -> Tensor:
    """Convert codes [E, parts * R, C / 2] to the library's [E, cols / 256, parts * rows, 128].

    Each of the stacked matrices is zero-padded to ``rows`` x ``cols``.
    """
    index, height, width = order.to(w.device), parts * rows, cols // 2

    def step(given: Tensor, target: Tensor) -> None:
        # Convert to signed first, so that padding with 0 means the value 0.
        values = signed_int4(given)
        if values.shape[1:] != (height, width):
            values = pad_matrices(values, rows, width, parts=parts)
        block_major(values, BLOCK // 2, index=index, out=target)

    return by_experts(step, w, w.new_empty(w.shape[0], cols // BLOCK, height, BLOCK // 2))
