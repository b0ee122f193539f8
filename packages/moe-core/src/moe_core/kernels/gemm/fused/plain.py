"""Activations in 16 or 32 bits, which may be quantised and dequantised before (QDQ).

Columns are gathered where those of the weights are permuted or pre-scaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_core.kernels.gemm.fused.call import Call
from moe_core.kernels.gemm.fused.scheme import TILE, ActivationScheme, CallShape, padded, quantized
from moe_core.kernels.gemm.tiles.columns import Columns, gather_columns
from moe_core.kernels.gemm.tiles.launch import OperandA, Result, Rows, has_aligned_rows
from moe_core.kernels.gemm.workspaces import BEFORE_GEMM2
from moe_core.kernels.ops.sort import QuantizeRows, Schedule, whole_row
from moe_core.spec.workspace import WorkspaceSpec


@dataclass(frozen=True, eq=False)
class RowQuantizer:
    """What rows of x and h become, each by a launch of its own or beside the sort.

    - ``quantize``: `@triton.jit` function of the tile kernel's form, which gets the tensor of ``dtype`` that values go
      to, then ``x_arguments`` or ``h_arguments``
    - ``stores_scales``: rows have a float32 scale each; else values hold them
    - ``by_expert``: the result depends on a row's expert (static scales)
    - ``keeps_range``: router weights may multiply gemm1's product in place of x
    """

    quantize: Any
    dtype: torch.dtype = torch.bfloat16
    x_arguments: tuple[Any, ...] = ()
    h_arguments: tuple[Any, ...] = ()
    stores_scales: bool = False
    by_expert: bool = False
    keeps_range: bool = True

    def job(self, rows: Tensor, values: Tensor, scales: Tensor | None, first: bool) -> QuantizeRows:
        """To ``values`` and their ``scales``; ``first``: the ``rows`` are those of x."""
        arguments = values, *(self.x_arguments if first else self.h_arguments)
        return QuantizeRows(rows, values, scales, self.quantize, whole_row(values.shape[1]), arguments)


@dataclass(frozen=True, eq=False)
class PlainScheme(ActivationScheme):
    """x and h in the dtype of x, or as ``rows`` makes them.

    ``x`` and ``h_columns``: columns as w13 and w2 have them; ``gathered``: whether any are gathered.
    """

    x: Columns
    h_columns: Columns
    gathered: bool = False
    rows: RowQuantizer | None = None

    @property
    def h_by_pair(self) -> bool:  # type: ignore[override]
        by_expert = self.rows is not None and self.rows.by_expert
        return by_expert or self.h_columns.index is not None or self.h_columns.pre_scales is not None

    def weights_first(self, has_lora: bool) -> bool:
        return has_lora or (self.rows is not None and not self.rows.keeps_range)

    def operands(self, shape: CallShape) -> tuple[WorkspaceSpec, ...]:
        config, pairs, rows = shape.config, shape.pairs, self.rows
        hidden, inner = padded(config.hidden_size), padded(config.intermediate_size)
        # what x is multiplied into has its exponents, what quantised h is made of needs more
        wide = config.dtype if rows is None or rows.dtype is config.dtype else shape.wide
        # of quantised rows gemm2 reads the values, and its adapters h itself
        phase = None if rows is None or config.is_lora_enabled else BEFORE_GEMM2
        specs = (
            WorkspaceSpec("h", (pairs, inner), wide, phase),
            WorkspaceSpec("gathered", (pairs if self.gathered else 0, max(hidden, inner)), wide, phase),
        )
        if rows is None:
            return specs
        scale = torch.float32 if rows.stores_scales else None
        by_pair = self.gathered or rows.by_expert
        return (
            *specs,
            *quantized("x", pairs if by_pair else shape.rows, hidden, rows.dtype, scale),
            *quantized("h", pairs, inner, rows.dtype, scale),
        )

    # -------------------------------------------------------------- x and h as operands

    def quantize_x(self, call: Call) -> tuple[Schedule, OperandA]:
        rows, x, columns = self.rows, call.x, self.x
        if columns.gathers(call.w2.n):
            return call.order(), self._gathered(call, "x", x, columns)
        if rows is None:
            return call.order(), self._plain(call, x, columns, call.by_token, call.w2.n, padded_rows=False)
        values, scales = call.quantized("x")
        job = rows.job(x[:, : columns.k], values, scales, first=True)
        scatters = rows.by_expert and call.by_token == "token"
        order = call.order_and_quantize(job, scatters, by_expert=rows.by_expert)
        return order, self._quantized(call, values, scales, "position" if scatters else call.by_token, columns.k)

    def result(self, call: Call) -> Result:
        return Result.of(call.workspace["h"])

    def h(self, call: Call, order: Schedule, which: Rows) -> OperandA:
        rows, h, columns, present = self.rows, call.workspace["h"], self.h_columns, call.w13.n
        if columns.gathers(present):
            return self._gathered(call, "h", h, columns)
        if rows is None:
            return self._plain(call, h, columns, which, present, padded_rows=not present % TILE)
        values, scales = call.quantized("h")
        in_sorted = "sorted", (order.offsets[call.routing.num_experts :],)
        job = rows.job(h[: call.pairs, : columns.k], values, scales, first=False)
        call.quantize(job, None if which == call.by_pair else in_sorted)
        return self._quantized(call, values, scales, which, columns.k)

    # -------------------------------------------------------------- kinds of rows

    def _gathered(self, call: Call, name: str, source: Tensor, columns: Columns) -> OperandA:
        """Rows by pair of "x", a row for each token, or "h", by pair; columns as the weight has them."""
        by_token, k, width = name == "x", columns.k, padded(columns.k)
        x = call.workspace["gathered"].flatten()[: call.pairs * width].view(call.pairs, width)
        gather_columns(source[:, :k], x, columns, call.routing, by_token=by_token, pdl=call.plan.pdl)
        if self.rows is None:
            return self._plain(call, x, columns, call.by_pair, k, padded_rows=True)
        values, scales = call.quantized(name)
        call.quantize(self.rows.job(x[:, :k], values, scales, first=by_token))
        return self._quantized(call, values, scales, call.by_pair, k)

    def _quantized(self, call: Call, values: Tensor, scales: Tensor | None, which: Rows, k: int) -> OperandA:
        if scales is not None:
            return OperandA((values, scales, values.stride(0), 1, 0, None), which)
        # the warp-specialised kernel would leave h in sorted order; batched rows have one order
        special = None if self.h_by_pair and call.by_pair == "pair" else _special(call, which, k)
        return OperandA((values, values.stride(0)), which, warp_specialised=special)

    @staticmethod
    def _plain(call: Call, x: Tensor, columns: Columns, which: Rows, present: int, *, padded_rows: bool) -> OperandA:
        """Rows of ``present`` columns as they are; ``padded_rows``: up to whole tiles there is room to read."""
        k, index, pre_scales = columns.k, columns.index, columns.pre_scales
        indexed = columns.indexes(present)
        reachable = not indexed and has_aligned_rows(x)
        aligned = reachable and present % 8 == 0
        if not indexed:
            arguments = (x, x.stride(0)) if padded_rows else (x, x.stride(0), k)
            whole = which != "token" or x.stride(0) % 16 == 0
            special = _special(call, which, k) if reachable and whole else None
            return OperandA(arguments, which, aligned=aligned, warp_specialised=special)
        if index is None:
            raise TypeError(f"the weight has {k} columns, the activations {present}, and there is no index")
        stride = 0 if pre_scales is None else pre_scales.stride(0)
        by_column = (x, x.stride(0), k, index, index.stride(0), pre_scales, stride)
        return OperandA(by_column, which, aligned=aligned)


def _special(call: Call, which: Rows, k: int) -> tuple[int, ...] | None:
    """What the warp-specialised kernel gets of rows of k columns; None: it can't read them."""
    if which != "token":
        return ()
    # gathered by the kernel itself, as the compiler knows it can: 32 bytes at a time
    return (call.routing.top_k,) if k % 16 == 0 else None
