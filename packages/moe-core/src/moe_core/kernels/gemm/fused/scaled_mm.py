"""8-bit activations whose scales do not change along k.

Scales are per token or per tensor (both dynamic), or per expert (static).

With few rows per expert, x is quantized during the sort (or its largest magnitude is found there), and gemm2 quantizes
h on load. With many rows, both GEMMs read bytes. Where the warp-specialized kernel computes gemm1, and for static
scales, x is scattered into the sorted order as it is quantized. A launch between the GEMMs quantizes h; with static
scales, the epilogue does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from moe_core.kernels.gemm.fused.call import Call
from moe_core.kernels.gemm.fused.scheme import ActivationScheme, CallShape, padded, quantized
from moe_core.kernels.gemm.tiles import scaled_mm as device
from moe_core.kernels.gemm.tiles.launch import (
    GemmWeight,
    InUse,
    OperandA,
    Result,
    Rows,
    TileFunctions,
    WarpSpecializedGemm,
    constant,
    weight_strides,
)
from moe_core.kernels.gemm.tiles.operands import load_values
from moe_core.kernels.gemm.workspaces import BEFORE_GEMM2
from moe_core.kernels.ops.batch import Batch
from moe_core.kernels.ops.sort import QuantizeRows, Schedule, clears_first, whole_row
from moe_core.spec.workspace import WorkspaceSpec

#: Rows of a tile up to which values may be quantized on load.
MAX_ROWS_QUANTIZED_ON_LOAD = 32
#: Columns of h up to which programs are so short that a separate launch quantizes h faster.
MAX_SHORT = 512
#: Mean rows per expert up to which gemm2 may quantize h on load. Beyond that, the workspace costs more than the launch
#: that it saves.
MAX_MEAN_ON_LOAD = 128

#: Granularity of the activation scales.
Granularity = Literal["token", "tensor", "static"]
_TILE = TileFunctions(
    device.open_values, load_values, device.open_weights, device.load_weights, device.multiply_codes, device.scale_acc
)
#: What gemm1 stores about h, see `moe_core.kernels.gemm.tiles.launch.Result`.
_AMAX_KINDS = {"token": "row", "tensor": "tensor", "static": "nan"}


@dataclass(frozen=True, eq=False)
class ScaledMMFunctions:
    """Device functions of an 8-bit element type, int8 or e4m3.

    See `moe_core.kernels.gemm.tiles.tile_kernel` for the functions. Defaults are those of
    `moe_core.kernels.gemm.tiles.scaled_mm`; other scales and weights use others. Weights as stored use e4m3 values in
    bfloat16 (`moe_core.kernels.gemm.as_stored`).

    Attributes:
        dtype: Dtype of the activation values.
        tile: Functions of the tile kernel.
        load_unquantized: `load_a` for rows that are quantized on load; None if unsupported.
        quantize_row: Quantizes a row by its own scale.
        quantize_static: Quantizes by the scale of the expert.
        packed: Weight columns per element; 0 if other functions read the weights. With 1, the warp-specialized kernel
            reads them too, and many rows may go straight into the sorted order.
        block_k: Columns of a k-loop step, 128 or a divisor of it.
        flags_nan: Whether codes cannot represent NaN, so that rows are flagged; see
            `moe_core.kernels.gemm.tiles.scaled_mm.scale_or_nan`.
    """

    dtype: torch.dtype
    tile: TileFunctions = _TILE
    load_unquantized: Any = device.load_unquantized
    quantize_row: Any = device.quantize_row
    quantize_static: Any = device.quantize_static
    packed: int = 1
    block_k: int = 128
    flags_nan: bool = False

    def weight(
        self, weights: Tensor, scales: Tensor, bias: Tensor | None, rows: int, columns: int, extra: tuple[Any, ...] = ()
    ) -> GemmWeight:
        """Build the weight of a GEMM.

        Args:
            weights: [E, rows of all halves, K], row-major, or block-major as in `weight_strides`. An element holds
                ``packed`` columns.
            scales: [E, rows, 1] or [E, halves].
            bias: [E, rows of all halves], or None.
            rows: Rows of one half.
            columns: K.
            extra: Arguments after those of `device.open_weights`, for scheme-specific functions.

        Returns:
            The weight.
        """
        half, row = (rows * scales.stride(1), scales.stride(1)) if scales.dim() == 3 else (scales.stride(1), 0)
        strides = (scales.stride(0), half, row, *extra)
        special = WarpSpecializedGemm(weights, _functions, (scales, *strides)) if self.packed == 1 else None
        return GemmWeight(
            (weights, scales, *weight_strides(weights, self.block_k // self.packed), *strides),
            rows,
            columns,
            lambda config: self.tile,
            self.block_k,
            bias,
            self.packed,
            warp_specialized=special,
        )


def _functions() -> Any:
    from moe_core.kernels.gemm.sm90.scaled_mm import prefetch, scaled_mm

    return prefetch, scaled_mm


E4M3 = ScaledMMFunctions(torch.float8_e4m3fn)


@dataclass(frozen=True, eq=False)
class ScaledMMScheme(ActivationScheme):
    """8-bit rows with one scale each, or with one scale for all.

    A dynamic scale per tensor spans the finite values of the tokens (for h: the pairs) that have a local expert.

    Attributes:
        functions: Element type.
        granularity: Granularity of the scales.
        x_scale: [E] static scales of x, or None.
        h_scale: [E] static scales of h, or None.
        scale_dtype: Dtype of scales in the workspace.
        quantize_on_load: Whether few rows may be quantized on load if ``functions`` support that.
    """

    functions: ScaledMMFunctions
    granularity: Granularity
    x_scale: Tensor | None = None
    h_scale: Tensor | None = None
    scale_dtype: torch.dtype = torch.float32
    quantize_on_load: bool = True

    def weights_first(self, has_lora: bool) -> bool:
        # Rows that share a scale must be weighted before they are quantized.
        return has_lora or self.granularity != "token"

    def operands(self, shape: CallShape) -> tuple[WorkspaceSpec, ...]:
        element, scale, kind, config = self.functions.dtype, self.scale_dtype, self.granularity, shape.config
        width, inner, dynamic = padded(config.hidden_size), padded(config.intermediate_size), kind != "static"
        rows, pairs = shape.rows, shape.pairs
        scatters = not dynamic or self.functions.packed == 1
        scattered = pairs if scatters and not shape.batched else 0
        found = kind == "tensor" or (not dynamic and self.functions.flags_nan)
        h_rows = few = pairs if dynamic or config.is_lora_enabled else 0
        if not (shape.batched or config.is_lora_enabled):
            few = min(few, MAX_MEAN_ON_LOAD * config.num_experts)
        return (
            *quantized("x", rows if dynamic or shape.batched else 0, width, element, scale),
            WorkspaceSpec("x_amax", (rows if found else 0,), torch.int32),
            *quantized("sorted", scattered, width, element, scale),
            WorkspaceSpec("amax", (max(pairs, 2),), torch.int32),
            WorkspaceSpec("h", (few, inner), shape.wide),
            # For more rows, gemm2 reads codes only.
            WorkspaceSpec("many_h", (h_rows if h_rows > few else 0, inner), shape.wide, BEFORE_GEMM2),
            *quantized("h", pairs, inner, element, scale),
        )

    # -------------------------------------------------------------- decisions per call

    def _quantizes_on_load(self, call: Call) -> bool:
        """Whether rows are few enough to be quantized on load."""
        loads = self.quantize_on_load and self.functions.load_unquantized is not None
        return loads and call.plan.block_m <= MAX_ROWS_QUANTIZED_ON_LOAD

    def _quantizes_h_on_load(self, call: Call) -> bool:
        few_launches = call.plan.gemm1.split_k > 1  # launch overhead dominates
        # One scale for all does not identify the row with a NaN, and a program that loads part of a row cannot
        # find it.
        kinds = ("token",) if self.functions.flags_nan else ("token", "tensor")
        loads = self.granularity in kinds and self._quantizes_on_load(call) and self._h(call) is call.workspace["h"]
        return loads and (few_launches or call.w2.k > MAX_SHORT)

    @staticmethod
    def _h(call: Call) -> Tensor:
        """Return the workspace of h before quantization."""
        few = call.workspace["h"]
        return few if call.pairs <= few.shape[0] else call.workspace["many_h"]

    def _amax(self, call: Call) -> Tensor | None:
        """Return the largest magnitudes of h, per row or [1]; or NaN flags per row."""
        amax, kind = call.workspace["amax"], self.granularity
        if kind == "tensor":
            return amax[:1]
        flags = self.functions.flags_nan and self._in_epilogue(call)
        return amax[: call.pairs] if flags or self._quantizes_h_on_load(call) else None

    def _rows(
        self,
        call: Call,
        values: Tensor,
        scales: Tensor | None,
        which: Rows,
        nan_flags: Tensor | None = None,
        by_row: bool = True,
    ) -> OperandA:
        """Return operand A of 8-bit values, or of wider values that are quantized on load.

        ``scales`` belong to rows, to experts or to all rows. For values that are quantized on load, they may be the
        bits of largest magnitudes.
        """
        by_expert = 1 if self.granularity == "static" and not by_row else 0
        arguments = (values, scales, values.stride(0), int(by_row), by_expert, nan_flags)
        if values.dtype is self.functions.dtype:
            return OperandA(arguments, which, warp_specialized=(scales, 1 if by_row else None, nan_flags))
        codes = call.workspace["h_values"]
        return OperandA((*arguments, values.shape[1], codes), which, load_a=self.functions.load_unquantized)

    # -------------------------------------------------------------- x

    def quantize_x(self, call: Call) -> tuple[Schedule, OperandA]:
        static, batched = self.granularity == "static", isinstance(call.routing, Batch)
        # The warp-specialized kernel needs the rows of a tile to be adjacent. A scale per expert needs every
        # pair separately.
        side_by_side = static or call.warp_specializes(call.plan.gemm1, call.w13)
        scatters = side_by_side and not batched and not self._quantizes_on_load(call)
        x, work, which, zero = call.x, call.workspace, call.by_token, self._zeroed(call)
        if call.x_scale is not None and not scatters:
            return call.order(zero=zero), self._rows(call, x, call.x_scale, which)
        if self.x_scale is not None and not (scatters or batched):
            flags, flagging = None, None
            if self.functions.flags_nan:
                flags = work["x_amax"]
                flagging = QuantizeRows(x, None, flags, device.row_nan_flags, whole_row(x.shape[1]))
            return call.order(flagging, zero=zero), self._rows(call, x, self.x_scale, which, flags, by_row=False)
        values, scales = call.quantized("sorted" if scatters else "x")
        if self.granularity == "tensor" and x.shape[0] > 1:
            order, amax, in_use = self._order_with_amax(call, scatters)
            call.quantize(self._job(x, values, scales, amax), in_use, positions=order.positions)
        else:
            job = self._job(x, values, scales, static=self.x_scale)
            order = call.order_and_quantize(job, scatters, by_expert=static, zero=zero)
        return order, self._rows(call, values, scales, "position" if scatters else which)

    def _zeroed(self, call: Call) -> Tensor | None:
        """Return the tensor to clear before gemm1."""
        return call.workspace["amax"][:2] if self.granularity == "tensor" else self._amax(call)

    def _order_with_amax(self, call: Call, positions: bool) -> tuple[Schedule, tuple[Tensor, int], InUse]:
        """Sort, and find the magnitudes of x.

        Returns the order, the magnitudes as `quantize_by_amax` takes them, and the selector of the rows of x that they
        span.
        """
        x, found, raised, zero = call.x, call.workspace["x_amax"], call.workspace["amax"][1:2], self._zeroed(call)
        group = whole_row(x.shape[1])
        if isinstance(call.routing, Batch):
            order, in_use = call.order(zero=zero), call.routing.in_use
            job = QuantizeRows(x, None, None, device.row_amax, group, (None, None, raised))
            call.quantize(job)
            return order, (raised, 1), in_use
        in_use, raises = ("tokens", call.routing.arguments), clears_first(call.pairs)
        arguments = x.shape[0], in_use[1], raised if raises else None
        job = QuantizeRows(x, None, found, device.row_amax, group, arguments)
        order = call.order(job, positions=positions, zero=zero)
        return order, (raised, 1) if raises else (found, x.shape[0]), in_use

    def _job(
        self,
        x: Tensor,
        values: Tensor,
        scales: Tensor | None,
        amax: tuple[Tensor | None, int] | None = None,
        static: Tensor | None = None,
    ) -> QuantizeRows:
        """Return the job that quantizes ``x`` to ``values``.

        The scale of each row is found from the row, or from ``amax``, or is ``static``.
        """
        arguments: tuple[Any, ...]
        quantize, arguments = self.functions.quantize_row, (values,)
        if amax is not None:
            quantize, arguments = device.quantize_by_amax, (values, *amax)
        elif static is not None:
            quantize, arguments = self.functions.quantize_static, (values, static)
        return QuantizeRows(x, values, scales, quantize, whole_row(values.shape[1]), arguments)

    # -------------------------------------------------------------- h

    def _in_epilogue(self, call: Call) -> bool:
        """Whether gemm1's epilogue quantizes h; adapters must read it before that."""
        return self.granularity == "static" and call.adapters is None

    def result(self, call: Call) -> Result:
        work, amax = call.workspace, self._amax(call)
        kind = constant("" if amax is None else _AMAX_KINDS[self.granularity])
        if not self._in_epilogue(call):
            return Result.of(self._h(call), amax=amax, amax_kind=kind)
        values, quantize = work["h_values"], self.functions.quantize_static
        return Result.of(values, quantize=quantize, quant_args=(values, self.h_scale), amax=amax, amax_kind=kind)

    def h(self, call: Call, order: Schedule, which: Rows) -> OperandA:
        values, found = call.quantized("h")
        # Whole tiles of gemm1 may be narrower than whole blocks of h, so that columns behind its last one may
        # not be written.
        wide, amax = self._h(call)[:, : call.w2.k], self._amax(call)
        if self._in_epilogue(call) and self.h_scale is not None:
            return self._rows(call, values, self.h_scale, which, amax, by_row=False)
        if self._quantizes_h_on_load(call) and amax is not None:
            return self._rows(call, wide, amax, which, by_row=self.granularity == "token")
        shared = (amax, 1) if self.granularity == "tensor" else None
        job = self._job(wide[: call.pairs], values, found, shared, self.h_scale)
        in_sorted = "sorted", (order.offsets[call.routing.num_experts :],)
        call.quantize(job, None if which == call.by_pair else in_sorted)
        return self._rows(call, values, found, which)
