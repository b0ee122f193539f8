"""Activations that are multiplied by pre-scales of their columns, pair by pair, and then rounded or put in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_core.gemm.fused.call import Call, Order
from moe_core.gemm.fused.scheme import ActivationScheme, CallShape, padded, quantized
from moe_core.gemm.launch import OperandA, Result, rows_by_pair
from moe_core.gemm.quantize_rows import quantize_rows
from moe_core.ops.sort import QuantizeRows, whole_row
from moe_core.workspace import WorkspaceSpec


@dataclass(frozen=True, eq=False)
class PreScaledScheme(ActivationScheme):
    """Rows of ``dtype`` by pair, made by launches of their own.

    - ``quantize``: `@triton.jit` function of the tile kernel's form; gets the tensor that values go to
    - ``by_token``: rows have a float32 scale each
    - ``x_pre_scales`` [E, K] and ``h_pre_scales`` [E, N] float32
    """

    quantize: Any
    dtype: torch.dtype
    by_token: bool
    x_pre_scales: Tensor | None
    h_pre_scales: Tensor | None
    h_by_pair = True

    def operands(self, shape: CallShape) -> tuple[WorkspaceSpec, ...]:
        config, pairs, inner = shape.config, shape.pairs, padded(shape.config.intermediate_size)
        # what x is multiplied into has its exponents, what quantised h is made of needs more
        wide = config.dtype if not self.by_token and config.dtype is torch.float16 else shape.wide
        return (
            WorkspaceSpec("gathered", (pairs, max(config.hidden_size, config.intermediate_size)), wide),
            *quantized("x", pairs, padded(config.hidden_size), self.dtype, torch.float32),
            WorkspaceSpec("h", (pairs, inner), wide),
            *quantized("h", pairs, inner, self.dtype, torch.float32),
        )

    def quantize_x(self, call: Call) -> tuple[Order, OperandA]:
        return call.order(), self._rows(call, "x", call.x, self.x_pre_scales, call.by_pair, by_token=True)

    def result(self, call: Call) -> Result:
        return Result.of(call.workspace["h"])

    def h(self, call: Call, order: Order, which: int) -> OperandA:
        return self._rows(call, "h", call.workspace["h"][:, : call.w2.k], self.h_pre_scales, which, by_token=False)

    def _rows(
        self, call: Call, name: str, x: Tensor, pre_scales: Tensor | None, which: int, *, by_token: bool
    ) -> OperandA:
        """Operand A of rows of ``x``, of tokens or of pairs."""
        values, scales = call.workspace[f"{name}_values"], call.workspace[f"{name}_scales"]
        x = call.gathered(x, x.shape[1], by_token=by_token, index=None, pre_scales=pre_scales)
        job = QuantizeRows(x, values, scales, self.quantize, whole_row(values.shape[1]), (values,))
        quantize_rows(job, rows_by_pair(call.routing), pdl=call.plan.pdl)
        arguments = (values, scales, values.stride(0), 1, 0, None) if self.by_token else (values, values.stride(0))
        return OperandA(arguments, which)
