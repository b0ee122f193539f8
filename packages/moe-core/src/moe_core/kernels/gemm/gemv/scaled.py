"""The layer for few tokens with 8-bit weights and activations.

See `moe_core.kernels.gemm.gemv.plan` for the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_core.kernels.gemm.gemv.plan import GemvLayer, Product
from moe_core.kernels.gemm.tiles.launch import GemmWeight, constant, weight_strides

#: Columns of a block of block-major weights.
BLOCK = 128
#: Columns of a step that one thread reads, and the number of words they occupy.
COLUMNS = 16
WORDS = 4
#: Number of e4m3 products summed in float16. The error is a quarter of that of rounding to bfloat16.
SUMMED = 4


@dataclass(frozen=True, eq=False)
class ScaledGemvLayer(GemvLayer):
    """Weights of int8 or e4m3 with activations quantized to the same type.

    Attributes:
        w13: Weight of gemm1, with the arguments of `moe_core.kernels.gemm.gemv.scaled_kernel` except the depth of a
            step.
        w2: Weight of gemm2, likewise.
        quantize: Function of the tile kernel's form for groups of ``group`` columns; None quantizes whole vectors.
        group: Columns per group; 0 for whole vectors.
        x_scale: [E] static scales of x, or None.
        h_scale: [E] static scales of h, or None.
    """

    w13: GemmWeight
    w2: GemmWeight
    quantize: Any = None
    group: int = 0
    x_scale: Tensor | None = None
    h_scale: Tensor | None = None

    def reads(self, x: Tensor) -> bool:
        """Whether the kernels can read the weights, in whole 16 bytes.

        Activations may have arbitrary alignment.

        Args:
            x: Hidden states.

        Returns:
            True if rows of both weights are aligned and K is a multiple of 16.
        """
        return all(weight.aligned and weight.k % COLUMNS == 0 for weight in (self.w13, self.w2))

    def multiply(self, product: Product) -> None:
        from moe_core.kernels.gemm.gemv.scaled_kernel import ScaledGemvForm, scaled_gemv_kernel

        config, routing, activation = product.config, product.routing, product.activation
        weight, scale = (self.w2, self.h_scale) if activation is None else (self.w13, self.x_scale)
        weights, scales, _, _, _, *others = weight.arguments
        halves = 2 if activation is not None and activation.gated else 1
        pairs = routing.top_k if product.finalizes else 1
        rows = config.block_n // halves // pairs
        lanes = config.block_w // WORDS
        # float32 results must have float32 accuracy.
        summed = 1 if product.x.dtype is torch.float32 else SUMMED
        product.start(
            scaled_gemv_kernel,
            routing.num_pairs // pairs * -(-weight.n // rows),
            weight,
            (weights, scales, *weight_strides(weights, BLOCK), *others),
            ScaledGemvForm(weights, constant(summed), self.quantize, constant(self.group), scale),
            ROWS=rows,
            LANES=lanes,
            DEPTH=config.num_stages,
            STEPS=-(-weight.k // (COLUMNS * lanes)),
            VECTORS=pairs if product.finalizes else 0,
        )
