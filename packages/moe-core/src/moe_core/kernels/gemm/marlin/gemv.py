"""The layer for few tokens with weights in fragment order.

See `moe_core.kernels.gemm.gemv.plan` for the layer and `moe_core.kernels.gemm.marlin.weight` for the weights.
"""

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
from moe_core.kernels.gemm.marlin._gemv_kernels import GemvForm, gemv_kernel
from moe_core.kernels.gemm.marlin.weight import MarlinMatrix, WordFunctions
from moe_core.kernels.gemm.plan import GemvConfig
from moe_core.kernels.gemm.tiles.launch import Routing, constant
from moe_core.kernels.gemm.tiles.quantize_rows import quantize_rows

#: Rows of four warps by `mma.sync` if no warps share rows.
MMA_ROWS = 64


@dataclass(frozen=True, eq=False)
class GemvFunctions:
    """An element type of the GEMV; see `moe_core.kernels.gemm.marlin._gemv_kernels`.

    Attributes:
        dequantize: Device function.
        scales: Kind of the scales.
        middle: Offset of the values in the bytes that ``dequantize`` returns; 0 if it returns values.
        words: Functions of `moe_core.kernels.gemm.marlin._gemv_mma_kernels`, for groups, where a plan may request it;
            or None.
    """

    dequantize: Any
    scales: str
    middle: int = 0
    words: WordFunctions | None = None


@dataclass(frozen=True, eq=False)
class MarlinGemvLayer(GemvLayer):
    """4- or 8-bit words with 16-bit activations.

    Attributes:
        functions: Element type.
        w13: Weight of gemm1.
        w2: Weight of gemm2.
        rows: Quantization of activations, each token's row separately; or None.
    """

    functions: GemvFunctions
    w13: MarlinMatrix
    w2: MarlinMatrix
    rows: RowQuantizer | None = None

    def reads(self, x: Tensor) -> bool:
        """Whether the kernels can read the activations: pairs of values, in column order.

        Args:
            x: Hidden states.

        Returns:
            True if they can.
        """
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
            raise ConfigError(
                f"the GEMV kernel cannot finalize gemm2 for top_k {top_k}, expected 1: it does not reduce pairs"
            )
        functions, matrix = self.functions, self.w2 if product.activation is None else self.w13
        _, steps, rows, words_of_step = matrix.words.shape
        width = steps * words_of_step
        kernel: Any = gemv_kernel
        form: tuple[Any, ...]
        if config.mma_sync and functions.words is not None and not INTERPRET.value:
            from moe_core.kernels.gemm.marlin._gemv_mma_kernels import MmaForm, gemv_mma_kernel

            # Words of a step: 16 per part.
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
    """Return a register limit as launch options.

    With paired scales the compiler uses 162 registers per thread, but 128 do not spill.
    """
    narrow = matrix.bits == 4 and config.block_w <= 128
    limited = narrow and matrix.paired and matrix.group_size == 128 and x.dtype is torch.bfloat16
    return {"maxnreg": 128} if limited and not INTERPRET.value else {}
