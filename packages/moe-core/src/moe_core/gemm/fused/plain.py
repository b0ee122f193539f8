"""Activations in 16 or 32 bits.  Their columns are gathered where those of the weights are permuted or pre-scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_core.gemm.columns import Columns, gather_columns
from moe_core.gemm.fused.call import Call
from moe_core.gemm.fused.scheme import TILE, ActivationScheme, CallShape, padded, quantized
from moe_core.gemm.launch import OperandA, Result, Rows, has_aligned_rows
from moe_core.ops.sort import QuantizeRows, Schedule, whole_row
from moe_core.workspace import WorkspaceSpec


@dataclass(frozen=True, eq=False)
class PlainScheme(ActivationScheme):
    """x and h in the dtype of x; what is gathered may be quantised then, by launches of its own.

    - ``x`` and ``h_columns``: columns as w13 and w2 have them; ``gathered``: whether any are gathered
    - ``quantize``: `@triton.jit` function of the tile kernel's form, which gets the tensor of ``dtype`` that values go
      to; ``by_token``: rows have a float32 scale each
    """

    x: Columns
    h_columns: Columns
    gathered: bool = False
    quantize: Any = None
    dtype: torch.dtype = torch.bfloat16
    by_token: bool = False

    @property
    def h_by_pair(self) -> bool:  # type: ignore[override]
        return self.h_columns.index is not None or self.h_columns.pre_scales is not None

    def operands(self, shape: CallShape) -> tuple[WorkspaceSpec, ...]:
        config, pairs = shape.config, shape.pairs
        hidden, inner = padded(config.hidden_size), padded(config.intermediate_size)
        # what x is multiplied into has its exponents, what quantised h is made of needs more
        wide = shape.wide if self.by_token else config.dtype
        made = 0 if self.quantize is None else pairs
        return (
            WorkspaceSpec("h", (pairs, inner), wide),
            WorkspaceSpec("gathered", (pairs if self.gathered else 0, max(hidden, inner)), wide),
            *quantized("x", made, hidden, self.dtype, torch.float32),
            *quantized("h", made, inner, self.dtype, torch.float32),
        )

    def quantize_x(self, call: Call) -> tuple[Schedule, OperandA]:
        return call.order(), self._rows(call, "x", call.x, self.x, call.by_token)

    def result(self, call: Call) -> Result:
        return Result.of(call.workspace["h"])

    def h(self, call: Call, order: Schedule, which: Rows) -> OperandA:
        return self._rows(call, "h", call.workspace["h"], self.h_columns, which)

    def _rows(self, call: Call, name: str, x: Tensor, columns: Columns, which: Rows) -> OperandA:
        """Operand A: "x", a row for each token, or "h", by pair; itself, or gathered by pair."""
        by_token = name == "x"
        present = call.w2.n if by_token else call.w13.n
        k, index, pre_scales = columns.k, columns.index, columns.pre_scales
        padded_rows = not (by_token or present % TILE)
        if columns.gathers(present):
            source, width = x[:, :present], padded(k)
            x = call.workspace["gathered"].flatten()[: call.pairs * width].view(call.pairs, width)
            gather_columns(source, x, columns, call.routing, by_token=by_token, pdl=call.plan.pdl)
            which, padded_rows = call.by_pair, True
        if self.quantize is not None:
            values, scales = call.workspace[f"{name}_values"], call.workspace[f"{name}_scales"]
            job = QuantizeRows(x[:, :k], values, scales, self.quantize, whole_row(values.shape[1]), (values,))
            call.quantize(job)
            rows = values, values.stride(0)
            return OperandA((values, scales, values.stride(0), 1, 0, None) if self.by_token else rows, which)
        indexed = columns.indexes(present)
        reachable = not indexed and has_aligned_rows(x)
        aligned = reachable and present % 8 == 0
        if not indexed:
            arguments = (x, x.stride(0)) if padded_rows else (x, x.stride(0), k)
            special: tuple[int, ...] | None = () if reachable else None
            if which == "token":
                # gathered by the warp-specialised kernel itself, as the compiler knows it can: 32 bytes at a time
                special = (call.routing.top_k,) if reachable and k % 16 == 0 and x.stride(0) % 16 == 0 else None
            return OperandA(arguments, which, aligned=aligned, warp_specialised=special)
        if index is None:
            raise TypeError(f"the weight has {k} columns, the activations {present}, and there is no index")
        stride = 0 if pre_scales is None else pre_scales.stride(0)
        by_column = (x, x.stride(0), k, index, index.stride(0), pre_scales, stride)
        return OperandA(by_column, which, aligned=aligned)
