"""Marlin-class kernels: int4 weights, repacked at load, with int8 activations (W4A8): standard and batched format.

Activations are quantised and dequantised per token, with zero points or without, and meet the codes as numbers of
bfloat16: see ``moe_core.gemm.marlin`` and ``moe_core.gemm.qdq``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from moe_core import GATED, NON_GATED, TRITON, Claims, FusedMoEActivationFormat, MoEWeights, cuda
from moe_core.experts_api import MarlinIntegerExperts
from torch import Tensor

from moe_int8.experts.triton_w4a8 import W4A8_KEYS
from moe_int8.layout import pack_unsigned_int4

if TYPE_CHECKING:
    from moe_core import KernelWeights
    from moe_core.kernel_api import Converted, RowQuantizer


class MarlinW4A8Int8Experts(MarlinIntegerExperts):
    """int4 weights that become numbers of bfloat16 in registers."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=W4A8_KEYS,
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        batch_invariant=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        notes="products in bfloat16, to which a code times its scale is rounded",
    )

    def converted(self, name: str, weights: MoEWeights, scale: Tensor) -> Converted:
        if name == "w13":
            weights = replace(weights, w13=pack_unsigned_int4(weights.w13))
        else:
            weights = replace(weights, w2=pack_unsigned_int4(weights.w2))
        return super().converted(name, weights, scale)

    def row_quantizer(self, weights: KernelWeights | None) -> RowQuantizer | None:
        if self.activation_key is None or self.activation_key.symmetric:
            return super().row_quantizer(weights)
        from moe_core.kernel_api import qdq

        from moe_int8.kernels.scaled_mm import QDQ_ROW_ZERO

        device = None if weights is None else weights.w13.device
        return qdq(self.activation_key, device, function=QDQ_ROW_ZERO)
