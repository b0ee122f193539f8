"""The layer for few tokens (`moe_core.kernels.gemm.gemv.plan`) with the weights of
`moe_core.kernels.gemm.marlin.weight`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from moe_core.errors import ConfigError
from moe_core.kernels.device.casts import INTERPRET
from moe_core.kernels.gemm.fused.plain import RowQuantizer
from moe_core.kernels.gemm.gemv.plan import GemvLayer, Product
from moe_core.kernels.gemm.heuristics.gemv import GemvConfig
from moe_core.kernels.gemm.marlin._gemv_kernels import GemvForm, gemv_kernel
from moe_core.kernels.gemm.marlin.weight import MarlinMatrix, WordFunctions
from moe_core.kernels.gemm.tiles.launch import Routing, constant
from moe_core.kernels.gemm.tiles.quantize_rows import quantize_rows

#: rows of four warps by `mma.sync` where none share the same
MMA_ROWS = 64


@dataclass(frozen=True, eq=False)
class GemvFunctions:
    """An element type's device function, scales and middle; see `moe_core.kernels.gemm.marlin._gemv_kernels`.

    ``words``: what `moe_core.kernels.gemm.marlin._gemv_mma_kernels` takes, of groups, where a plan may ask for it.
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

    def multiply(self, product: Product) -> None:
        config, top_k = product.config, product.routing.top_k
        if product.finalizes and top_k != 1:
            raise ConfigError(f"words: gemm2 adds up no pairs of a token, of which there are {top_k}")
        functions, matrix = self.functions, self.w2 if product.activation is None else self.w13
        _, steps, rows, words_of_step = matrix.words.shape
        width = steps * words_of_step
        kernel: Any = gemv_kernel
        form: tuple[Any, ...]
        if config.mma_sync and functions.words is not None and not INTERPRET.value:
            from moe_core.kernels.gemm.marlin._gemv_mma_kernels import MmaForm, gemv_mma_kernel

            # words of a step: 16 of each part
            parts, groups = MMA_ROWS // config.block_n, functions.words.groups
            step = 16 * parts
            turns = -(-width // step)
            kernel, form = gemv_mma_kernel, MmaForm(constant(parts), constant(groups), functions.words.dequantize())
            options = {"STEPS": turns, "DEPTH": min(max(config.block_w // step, 1), turns), "EVEN": width % step == 0}
        else:
            constants = map(constant, (matrix.bits, functions.middle, functions.scales, matrix.group_size))
            form = GemvForm(functions.dequantize, *constants)
            options = {"BLOCK_N": config.block_n, "BLOCK_W": config.block_w, "EVEN": width % config.block_w == 0}
            options |= _limit(matrix, product.x, config)
        options |= {"FINALIZE": product.finalizes}
        programs = product.routing.num_pairs * -(-rows // config.block_n)
        product.start(kernel, programs, matrix, matrix.arguments, form, **options)


def _limit(matrix: MarlinMatrix, x: Tensor, config: GemvConfig) -> dict[str, int]:
    """A limit on registers: with scales in pairs the compiler takes 162 of a thread, though 128 spill nothing."""
    narrow = matrix.bits == 4 and config.block_w <= 128
    limited = narrow and matrix.paired and matrix.group_size == 128 and x.dtype is torch.bfloat16
    return {"maxnreg": 128} if limited and not INTERPRET.value else {}
