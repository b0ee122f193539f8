"""The layer for few tokens (`moe_core.gemm.gemv`) with the weights of `moe_core.gemm.marlin.weight`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from moe_core.errors import ConfigError
from moe_core.gemm.fused.plain import RowQuantizer
from moe_core.gemm.gemv import GemvLayer, Step, vector_arguments
from moe_core.gemm.heuristics.gemv import GemvConfig
from moe_core.gemm.launch import Activation, Routing, constant
from moe_core.gemm.marlin._gemv_kernels import GemvForm, gemv_kernel
from moe_core.gemm.marlin.weight import MarlinMatrix, WordFunctions
from moe_core.gemm.quantize_rows import quantize_rows
from moe_core.jit.casts import INTERPRET
from moe_core.jit.launch import launch

#: rows of four warps by `mma.sync` where none share the same
MMA_ROWS = 64


@dataclass(frozen=True, eq=False)
class GemvFunctions:
    """An element type's device function, scales and middle; see `moe_core.gemm.marlin._gemv_kernels`.

    ``words``: what `moe_core.gemm.marlin._gemv_mma_kernels` takes, where a plan may ask for it.
    """

    dequantize: Any
    scales: str
    middle: int = 0
    words: WordFunctions | None = None


@dataclass(frozen=True, eq=False)
class MarlinGemvLayer(GemvLayer):
    """Words of 4 or 8 bits x 16-bit activations, which ``rows`` may make, each token's by itself."""

    functions: GemvFunctions
    w13: MarlinMatrix
    w2: MarlinMatrix
    rows: RowQuantizer | None = None

    def reads(self, x: Tensor) -> bool:
        """Whether the kernels can read the activations: two numbers at a time, in the order of their columns."""
        if any(m.index is not None or m.pre_scales is not None or m.k % 2 for m in (self.w13, self.w2)):
            return False
        if self.rows is not None:
            return True
        return x.data_ptr() % 4 == 0 and x.stride(0) % 2 == 0

    def operand(
        self, name: Literal["x", "h"], values: Tensor, routing: Routing, workspace: Mapping[str, Tensor], pdl: bool
    ) -> Tensor:
        if self.rows is None:
            return values
        first = name == "x"
        rows = values if first else values[: routing.num_pairs, : self.w2.k]
        made = workspace[f"{name}_values"][: rows.shape[0]]
        job = self.rows.job(rows, made, None, first=first)
        quantize_rows(job, ("all", ()) if first else routing.in_use, pdl=pdl)
        return made

    def multiply(self, x: Tensor, out: Tensor, routing: Routing, config: GemvConfig, step: Step, pdl: bool) -> None:
        finalize = step == "gemm2_finalize"
        if finalize and routing.top_k != 1:
            raise ConfigError(f"words: gemm2 adds up no pairs of a token, of which there are {routing.top_k}")
        matrix, activation = (self.w13, self.activation) if step == "gemm1" else (self.w2, None)
        gemv(self.functions, x, matrix, out, routing, activation, config, pdl=pdl, finalize=finalize)


def gemv(
    functions: GemvFunctions,
    x: Tensor,
    matrix: MarlinMatrix,
    out: Tensor,
    routing: Routing,
    activation: Activation | None,
    config: GemvConfig,
    *,
    pdl: bool,
    finalize: bool = False,
) -> None:
    """``out`` [pairs, N]: each pair's matrix times its row of ``x``, a token's or, without ``activation``, its own.

    ``finalize``: tokens have one pair each, and ``out`` is the layer's.
    """
    _, steps, rows, words_of_step = matrix.words.shape
    width = steps * words_of_step
    arguments = vector_arguments(out, x, matrix.arguments, matrix.n, matrix.k, matrix.bias, routing, activation)
    grid = (routing.num_pairs * -(-rows // config.block_n),)
    if config.mma_sync and functions.words is not None and not INTERPRET.value:
        from moe_core.gemm.marlin._gemv_mma_kernels import MmaForm, gemv_mma_kernel

        # words of a step: 16 of each part
        parts, groups, dequantize = MMA_ROWS // config.block_n, functions.words.groups, functions.words.dequantize
        step = 16 * parts
        turns = -(-width // step)
        launch(
            gemv_mma_kernel,
            grid,
            *arguments,
            MmaForm(constant(parts), constant(groups), dequantize()),
            STEPS=turns,
            DEPTH=min(max(config.block_w // step, 1), turns),
            EVEN=width % step == 0,
            SECOND=activation is None,
            ALONG_M=config.along_m,
            FINALIZE=finalize,
            pdl=pdl,
            num_warps=4,
        )
        return
    constants = map(constant, (matrix.bits, functions.middle, functions.scales, matrix.group_size))
    launch(
        gemv_kernel,
        grid,
        *arguments,
        GemvForm(functions.dequantize, *constants),
        BLOCK_N=config.block_n,
        BLOCK_W=config.block_w,
        EVEN=width % config.block_w == 0,
        SECOND=activation is None,
        ALONG_M=config.along_m,
        FINALIZE=finalize,
        pdl=pdl,
        num_warps=config.num_warps,
        **_limit(matrix, x, config),
    )


def _limit(matrix: MarlinMatrix, x: Tensor, config: GemvConfig) -> dict[str, int]:
    """A limit on registers: with scales in pairs the compiler takes 162 of a thread, though 128 spill nothing."""
    narrow = matrix.bits == 4 and config.block_w <= 128
    limited = narrow and matrix.paired and matrix.group_size == 128 and x.dtype is torch.bfloat16
    return {"maxnreg": 128} if limited and not INTERPRET.value else {}
