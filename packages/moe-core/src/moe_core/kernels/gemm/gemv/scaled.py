"""The layer for few tokens (`moe_core.kernels.gemm.gemv.plan`) with 8-bit weights and activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_core.kernels.gemm.gemv.plan import GemvLayer, Product
from moe_core.kernels.gemm.tiles.launch import GemmWeight, constant, weight_strides

#: columns of a block of block-major weights
BLOCK = 128
#: columns of a step that a thread reads, and words that these are
COLUMNS = 16
WORDS = 4
#: products of e4m3 that are added up in float16: an error of a quarter of what rounding to bfloat16 makes
SUMMED = 4


@dataclass(frozen=True, eq=False)
class ScaledGemvLayer(GemvLayer):
    """Weights of int8 or e4m3 with activations that are quantised alike.

    ``w13`` and ``w2`` have the arguments that `moe_core.kernels.gemm.gemv.scaled_kernel` takes, but for the depth of a
    step. ``quantize``: groups of ``group`` columns, of the tile kernel's form; None, and 0: whole vectors, by
    ``x_scale`` and ``h_scale`` [E] where they are static.
    """

    w13: GemmWeight
    w2: GemmWeight
    quantize: Any = None
    group: int = 0
    x_scale: Tensor | None = None
    h_scale: Tensor | None = None

    def reads(self, x: Tensor) -> bool:
        """Whether the kernels can read the weights, which is in whole 16 bytes; activations lie anyhow."""
        return all(weight.aligned and weight.k % COLUMNS == 0 for weight in (self.w13, self.w2))

    def multiply(self, product: Product) -> None:
        from moe_core.kernels.gemm.gemv.scaled_kernel import ScaledGemvForm, scaled_gemv_kernel

        config, routing, activation = product.config, product.routing, product.activation
        weight, scale = (self.w2, self.h_scale) if activation is None else (self.w13, self.x_scale)
        # of each half
        weights, scales, _, _, _, *others = weight.arguments
        halves = 2 if activation is not None and activation.gated else 1
        pairs = routing.top_k if product.finalizes else 1
        rows = config.block_n // halves // pairs
        lanes = config.block_w // WORDS
        # float32 results are to be as exact as float32
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
