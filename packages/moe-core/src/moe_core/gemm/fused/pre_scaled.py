"""Activations that are multiplied by pre-scales of their columns, pair by pair, and then rounded or put in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_core.gemm.columns import gather_columns
from moe_core.gemm.fused.call import Call, Order
from moe_core.gemm.fused.scheme import ActivationScheme, CallShape, first_rows, padded
from moe_core.gemm.launch import OperandA, Result
from moe_core.gemm.quantize_rows import InUse, ordered_rows, quantize_rows, routed_pairs
from moe_core.ops.batch import Batch
from moe_core.ops.sort import QuantizeRows, whole_row
from moe_core.workspace import WorkspaceSpec


@dataclass(frozen=True, eq=False)
class PreScaledScheme(ActivationScheme):
    """Rows of ``dtype`` by pair, made by launches of their own.

    - ``quantize``: `@triton.jit` function of the tile kernel's form; gets the tensor that values go to
    - ``by_token``: rows have a float32 scale each
    - ``pre_scaled``: rows have pre-scales: ``x_pre_scales`` [E, K] and ``h_pre_scales`` [E, N] float32
    """

    quantize: Any
    dtype: torch.dtype
    by_token: bool
    pre_scaled: bool
    x_pre_scales: Tensor | None = None
    h_pre_scales: Tensor | None = None
    h_by_pair = True

    def operands(self, shape: CallShape) -> tuple[WorkspaceSpec, ...]:
        inner, width, pairs = padded(shape.intermediate_size), padded(shape.hidden_size), shape.pairs
        rows = pairs if self.pre_scaled else shape.rows
        # what x is multiplied into has its exponents, what quantised h is made of needs more
        wide = shape.dtype if not self.by_token and shape.dtype is torch.float16 else shape.wide
        most = max(shape.hidden_size, shape.intermediate_size)
        return (
            WorkspaceSpec("multiplied", (pairs if self.pre_scaled else 0, most), wide),
            WorkspaceSpec("x_values", (rows, width), self.dtype),
            WorkspaceSpec("x_scales", (rows,), torch.float32),
            WorkspaceSpec("h", (pairs, inner), wide),
            WorkspaceSpec("h_values", (pairs, inner), self.dtype),
            WorkspaceSpec("h_scales", (pairs,), torch.float32),
        )

    def quantize_x(self, call: Call) -> tuple[Order, OperandA]:
        work = call.workspace
        values, scales = work["x_values"], work["x_scales"]
        if self.pre_scaled:
            order = call.order()
            self._quantize(call, order, call.x, self.x_pre_scales, values, scales, by_token=True)
            return order, self._rows(values, scales, call.by_pair)
        job = QuantizeRows(call.x, values, scales, self.quantize, whole_row(values.shape[1]), (values,))
        return call.order(job), self._rows(values, scales, call.by_token)

    def result(self, call: Call) -> Result:
        return Result(call.workspace["h"])

    def h(self, call: Call, order: Order, which: int) -> OperandA:
        work = call.workspace
        values, scales = work["h_values"], work["h_scales"]
        self._quantize(call, order, work["h"][:, : call.w2.k], self.h_pre_scales, values, scales, by_token=False)
        return self._rows(values, scales, which)

    def _rows(self, values: Tensor, scales: Tensor, which: int) -> OperandA:
        arguments = (values, scales, values.stride(0), 1, 0, None) if self.by_token else (values, values.stride(0))
        return OperandA(arguments, which)

    def _quantize(
        self,
        call: Call,
        order: Order,
        x: Tensor,
        pre_scales: Tensor | None,
        values: Tensor,
        scales: Tensor,
        *,
        by_token: bool,
    ) -> None:
        """Rows of ``x``, of tokens or of pairs, as ``values`` of pairs."""
        routing, pairs, pdl = call.routing, call.pairs, call.plan.pdl
        if pre_scales is not None:
            room = first_rows(call.workspace["multiplied"], pairs, x.shape[1])
            gather_columns(x, room, routing, by_token=by_token, index=None, factor=pre_scales, pdl=pdl)
            x = room
        in_use: InUse = ordered_rows(order, routing) if isinstance(routing, Batch) else routed_pairs(routing)
        quantize_rows(x[:pairs], values[:pairs], scales, self.quantize, (values,), in_use, pdl=pdl)
