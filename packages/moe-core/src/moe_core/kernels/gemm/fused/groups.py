"""Activations quantized in groups of columns.

x is quantized during the sort, h in gemm1's epilogue. All columns of a group are in the tile of one program, so that h
needs no separate launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_core.kernels.gemm.fused.call import Call
from moe_core.kernels.gemm.fused.scheme import TILE, ActivationScheme, CallShape, padded, quantized
from moe_core.kernels.gemm.tiles.launch import OperandA, Result, Rows, constant
from moe_core.kernels.ops.sort import QuantizeRows, Schedule
from moe_core.spec.workspace import WorkspaceSpec

#: Number of pairs above which rows are scattered into the sorted order.
MIN_SCATTERED_PAIRS = 256


@dataclass(frozen=True, eq=False)
class GroupScheme(ActivationScheme):
    """Activations quantized in groups of columns.

    Attributes:
        quantize: `@triton.jit` function of the tile kernel's form, which receives the destination tensor.
        dtype: Dtype of the values.
        group: Columns per group.
        block: Columns of a tile of h.
        scale_dtype: Dtype of stored scales, one per group; None if the values include them.
        scatters: Whether x goes straight into the sorted order where the warp-specialized kernel computes gemm1.
        keeps_range: Whether router weights may multiply gemm1's output instead of x.
    """

    quantize: Any
    dtype: torch.dtype
    group: int
    block: int = TILE
    scale_dtype: torch.dtype | None = None
    scatters: bool = False
    keeps_range: bool = True

    def weights_first(self, has_lora: bool) -> bool:
        return has_lora or not self.keeps_range

    def operands(self, shape: CallShape) -> tuple[WorkspaceSpec, ...]:
        config = shape.config
        width, inner = padded(config.hidden_size, self.block), padded(config.intermediate_size, self.block)
        scattered = shape.pairs if self.scatters and shape.pairs > MIN_SCATTERED_PAIRS and not shape.batched else 0
        return (
            *self._quantized("x", shape.rows, width),
            *self._quantized("sorted", scattered, width),
            WorkspaceSpec("h", (shape.pairs if config.is_lora_enabled else 0, inner), shape.wide),
            *self._quantized("h", shape.pairs, inner),
        )

    def _quantized(self, name: str, rows: int, columns: int) -> tuple[WorkspaceSpec, ...]:
        return quantized(name, rows, columns, self.dtype, self.scale_dtype, columns // self.group)

    def rows(self, values: Tensor, scales: Tensor | None, which: Rows) -> OperandA:
        """Return operand A for quantized rows.

        Args:
            values: [rows, columns].
            scales: [rows, groups], or None.
            which: Meaning of a tile row.

        Returns:
            The operand.
        """
        if scales is None:
            return OperandA((values, values.stride(0)), which)
        warp_specialized = (scales, scales.stride(0))
        return OperandA((values, scales, values.stride(0), scales.stride(0)), which, warp_specialized=warp_specialized)

    def quantize_x(self, call: Call) -> tuple[Schedule, OperandA]:
        scatters = self._scatters(call)
        if call.x_scale is not None and not scatters:
            return call.order(), self.rows(call.x, call.x_scale, call.by_token)
        values, scales = call.quantized("sorted" if scatters else "x")
        job = QuantizeRows(call.x, values, scales, self.quantize, self.group, (values,))
        order = call.order_and_quantize(job, scatters)
        return order, self.rows(values, scales, "position" if scatters else call.by_token)

    def _scatters(self, call: Call) -> bool:
        # The batched format has no workspace for it.
        fits = self.scatters and call.warp_specializes(call.plan.gemm1, call.w13)
        return fits and 0 < call.pairs <= call.workspace["sorted_values"].shape[0]

    def result(self, call: Call) -> Result:
        if call.adapters is not None:
            # gemm2's adapters read h before it is quantized.
            return Result.of(call.workspace["h"], block=constant(self.block))
        values, scales = call.quantized("h")
        return Result.of(
            values,
            scales,
            quantize=self.quantize,
            quant_args=(values,),
            groups=constant(1 if self.scale_dtype is None else self.block // self.group),
            block=constant(self.block),
        )

    def h(self, call: Call, order: Schedule, which: Rows) -> OperandA:
        values, scales = call.quantized("h")
        if call.adapters is not None:
            # Treat every group of every pair as a row.
            wide, groups = (each.view(-1, self.group) for each in (call.workspace["h"][: call.pairs], values))
            of_groups = None if scales is None else scales.view(-1)
            call.quantize(QuantizeRows(wide, groups, of_groups, self.quantize, self.group, (groups,)), ("all", ()))
        rows, columns = self.rows(values, scales, which), call.w2.k
        if call.w13.interleaved and columns % self.block:
            # A tile of gemm1 is half as wide in h, so that some columns of the last block may not be
            # written.
            return replace(rows, arguments=(*rows.arguments, columns))
        return rows
