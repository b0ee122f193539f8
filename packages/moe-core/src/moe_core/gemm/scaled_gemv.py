"""The layer for few tokens (`moe_core.gemm.gemv`) with 8-bit weights and activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_core.gemm.gemv import GemvLayer, Step, vector_arguments
from moe_core.gemm.heuristics.gemv import GemvConfig
from moe_core.gemm.launch import GemmWeight, Routing, constant, weight_strides
from moe_core.jit.launch import launch

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

    ``w13`` and ``w2`` have the arguments that `moe_core.gemm.scaled_gemv_kernel` takes, but for the depth of a step.
    ``quantize``: groups of ``group`` columns, of the tile kernel's form; None, and 0: whole vectors, by ``x_scale`` and
    ``h_scale`` [E] where they are static.
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

    def multiply(self, x: Tensor, out: Tensor, routing: Routing, config: GemvConfig, step: Step, pdl: bool) -> None:
        from moe_core.gemm.scaled_gemv_kernel import ScaledGemvForm, scaled_gemv_kernel

        second, finalize = step != "gemm1", step == "gemm2_finalize"
        weight, scale = (self.w2, self.h_scale) if second else (self.w13, self.x_scale)
        activation = None if second else self.activation
        # of each half
        weights, scales, _, _, _, *others = weight.arguments
        halves = 2 if activation is not None and activation.gated else 1
        pairs = routing.top_k if finalize else 1
        rows = config.block_n // halves // pairs
        arguments = weights, scales, *weight_strides(weights, BLOCK), *others
        lanes = config.block_w // WORDS
        # float32 results are to be as exact as float32
        summed = 1 if x.dtype is torch.float32 else SUMMED
        launch(
            scaled_gemv_kernel,
            (routing.num_pairs // pairs * -(-weight.n // rows),),
            *vector_arguments(out, x, arguments, weight.n, weight.k, weight.bias, routing, activation),
            ScaledGemvForm(weights, constant(summed), self.quantize, constant(self.group)),
            scale,
            ROWS=rows,
            LANES=lanes,
            DEPTH=config.num_stages,
            STEPS=-(-weight.k // (COLUMNS * lanes)),
            VECTORS=pairs if finalize else 0,
            SECOND=second,
            ALONG_M=config.along_m,
            pdl=pdl,
            num_warps=config.num_warps,
        )
