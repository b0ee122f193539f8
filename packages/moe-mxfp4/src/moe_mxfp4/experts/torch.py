"""Plain torch: any device, and the production path on CPUs.

Weights stay as the checkpoint stores them. One block of rows at a time is dequantized to float32 for its product.
"""

from __future__ import annotations

import torch
from moe_core import (
    GATED,
    NON_GATED,
    Claims,
    FusedMoEActivationFormat,
    FusedMoEQuantDesc,
    TensorError,
    TorchExperts,
    any_device,
    kMxfp4Static,
)
from torch import Tensor

from moe_mxfp4 import blocks
from moe_mxfp4.keys import ACTIVATIONS


class TorchMxfp4Experts(TorchExperts):
    """Every key of the scheme; quantized activations are dequantized and multiplied in float32."""

    claims = Claims(
        devices=(any_device(),),
        keys=((kMxfp4Static, None), *((kMxfp4Static, activation) for activation in ACTIVATIONS)),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        lora=True,
        batch_invariant=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        cuda_graph=False,
        takes_quantized=True,
        verified_on=("cpu",),
        notes="reads token counts on the host: no CUDA graphs",
    )

    def product(self, x: Tensor, weights: Tensor, desc: FusedMoEQuantDesc, expert: int, parts: int = 1) -> Tensor:
        if desc.scale is None:
            raise TensorError("scale is missing, but the weights are quantized")
        return blocks.product(x, weights[expert], desc.scale[expert])
