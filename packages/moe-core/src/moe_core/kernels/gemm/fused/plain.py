"""16- or 32-bit activations, optionally quantized and dequantized first (QDQ).

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
    """Quantization of whole rows of x and h, in a separate launch or during the sort.

    Attributes:
        quantize: `@triton.jit` function of the tile kernel's form, which receives the destination tensor, then
            ``x_arguments`` or ``h_arguments``.
        dtype: Dtype of the values.
        x_arguments: Further arguments for rows of x.
        h_arguments: Further arguments for rows of h.
        stores_scales: Whether each row has a stored float32 scale; otherwise the values include it.
        by_expert: Whether the result depends on a row's expert (static scales).
        keeps_range: Whether router weights may multiply gemm1's output instead of x.
    """

    quantize: Any
    dtype: torch.dtype = torch.bfloat16
    x_arguments: tuple[Any, ...] = ()
    h_arguments: tuple[Any, ...] = ()
    stores_scales: bool = False
    by_expert: bool = False
    keeps_range: bool = True

    def job(self, rows: Tensor, values: Tensor, scales: Tensor | None, first: bool) -> QuantizeRows:
        """Return the job that quantizes rows.

        Args:
            rows: Source rows.
            values: Destination of the values.
            scales: Destination of the scales, or None.
            first: Whether the rows are those of x; otherwise those of h.

        Returns:
            The job.
        """
        arguments = values, *(self.x_arguments if first else self.h_arguments)
        return QuantizeRows(rows, values, scales, self.quantize, whole_row(values.shape[1]), arguments)


@dataclass(frozen=True, eq=False)
class PlainScheme(ActivationScheme):
    """x and h in the dtype of x, or as ``rows`` quantizes them.

    Attributes:
        x: Columns of x as w13 requires them.
        h_columns: Columns of h as w2 requires them.
        gathered: Whether columns of either are gathered.
        rows: Quantization of rows, or None.
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
        # Gathered x has the exponent range of x; h before quantization needs more.
        wide = config.dtype if rows is None or rows.dtype is config.dtype else shape.wide
        # With quantized rows, gemm2 reads the values, and its adapters read h itself.
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
        """Gather rows by pair: of "x" (one source row per token) or of "h" (one per pair).

        Columns are ordered as the weight requires.
        """
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
        # The warp-specialized kernel would leave h in sorted order. Batched rows have only one order.
        special = None if self.h_by_pair and call.by_pair == "pair" else _special(call, which, k)
        return OperandA((values, values.stride(0)), which, warp_specialized=special)

    @staticmethod
    def _plain(call: Call, x: Tensor, columns: Columns, which: Rows, present: int, *, padded_rows: bool) -> OperandA:
        """Return rows of ``present`` columns unchanged.

        ``padded_rows``: whether memory up to whole tiles may be read.
        """
        k, index, pre_scales = columns.k, columns.index, columns.pre_scales
        indexed = columns.indexes(present)
        reachable = not indexed and has_aligned_rows(x)
        aligned = reachable and present % 8 == 0
        if not indexed:
            arguments = (x, x.stride(0)) if padded_rows else (x, x.stride(0), k)
            whole = which != "token" or x.stride(0) % 16 == 0
            special = _special(call, which, k) if reachable and whole else None
            return OperandA(arguments, which, aligned=aligned, warp_specialized=special)
        if index is None:
            raise TypeError(f"x has {present} columns, but the weight has {k} and no column index")
        stride = 0 if pre_scales is None else pre_scales.stride(0)
        by_column = (x, x.stride(0), k, index, index.stride(0), pre_scales, stride)
        return OperandA(by_column, which, aligned=aligned)


def _special(call: Call, which: Rows, k: int) -> tuple[int, ...] | None:
    """Return the warp-specialized kernel's arguments for rows of k columns.

    The result is None if it cannot read them.
    """
    if which != "token":
        return ()
    # The kernel gathers rows itself, 32 bytes at a time, the alignment that the compiler can prove.
    return (call.routing.top_k,) if k % 16 == 0 else None
