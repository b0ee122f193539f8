"""Activations of 8 bits whose scales do not change along k: per token, per tensor (both dynamic), or per expert.

Few rows per expert: x is quantised, or its largest magnitude found, beside the sort, and h while gemm2 loads it.  Many:
both GEMMs read bytes.  Where gemm1 is computed by the warp-specialised kernel, and for static scales, x is scattered
into the sorted order as it is quantised; a launch between the GEMMs quantises h (static: the epilogue).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton.language as tl
from torch import Tensor

from moe_core.gemm import scaled_mm as device
from moe_core.gemm.fused.call import Call, Order
from moe_core.gemm.fused.scheme import ActivationScheme, CallShape, padded, quantized
from moe_core.gemm.launch import FLOAT32, OperandA, Result, Routing, constant, rows_by_pair
from moe_core.gemm.quantize_rows import find_amax, quantize_rows, routed_tokens, sorted_rows
from moe_core.gemm.tile_kernel import POSITION, TOKEN
from moe_core.ops.batch import Batch
from moe_core.ops.sort import QuantizeRows, clears_first, whole_row
from moe_core.workspace import WorkspaceSpec

#: rows of a tile up to which values may be quantised while they are loaded
MAX_ROWS_QUANTIZED_ON_LOAD = 32
#: columns of h up to which programs are so short that a launch of its own quantises it faster
MAX_SHORT = 512

#: of the activations' scales
Granularity = Literal["token", "tensor", "static"]


@dataclass(frozen=True, eq=False)
class ScaledMMFunctions:
    """An element type of 8 bits, int8 or e4m3, by its `@triton.jit` functions; see `moe_core.gemm.tile_kernel`.

    Weights as stored have e4m3 numbers in bfloat16 beside them (`moe_core.gemm.as_stored`).

    Defaults are those of `moe_core.gemm.scaled_mm`; others go with other scales and weights.

    - ``multiply``: the product of a step, added to a sum of the type ``accumulate``
    - ``quantize_row``: a row by a scale of its own; ``quantize_static``: by the scale of its expert
    - ``load_unquantized``: rows that are quantised while they are loaded (``static_on_load``: by static scales too);
      None where they cannot be
    - ``prefetch_weights`` may be None
    - ``flags_nan``: codes have no NaN, so that rows are flagged: see `moe_core.gemm.scaled_mm.scale_or_nan`
    - ``packed``: weights of so many columns lie in an element; where it is one, the warp-specialised kernel reads them
      too; ``block_k``: depth of a step, 128 or a divisor of it
    """

    dtype: torch.dtype
    multiply: Any = device.multiply_codes
    quantize_row: Any = device.quantize_row
    quantize_static: Any = device.quantize_static
    load_values: Any = device.load_values
    load_unquantized: Any = device.load_unquantized
    open_weights: Any = device.open_weights
    load_weights: Any = device.load_weights
    prefetch_weights: Any = device.prefetch_weights
    scale_acc: Any = device.scale_acc
    accumulate: tl.constexpr = FLOAT32
    static_on_load: bool = True
    packed: int = 1
    block_k: int = 128
    flags_nan: bool = False


E4M3 = ScaledMMFunctions(torch.float8_e4m3fn)


@dataclass(frozen=True, eq=False)
class ScaledMMScheme(ActivationScheme):
    """Rows of ``functions``' type with a scale each, or one for all.

    ``x_scale`` and ``h_scale`` [E] of static ones.  ``scale_dtype`` of scales in scratch memory.  ``quantize_on_load``:
    few rows may be quantised while they are loaded, if ``functions`` can; ``scatters``: many may go straight into the
    sorted order.  A dynamic scale per tensor spans the tokens, then the pairs, that have a local expert, as far as they
    are finite.
    """

    functions: ScaledMMFunctions
    granularity: Granularity
    x_scale: Tensor | None = None
    h_scale: Tensor | None = None
    scale_dtype: torch.dtype = torch.float32
    quantize_on_load: bool = True
    scatters: bool = True

    def weights_first(self, has_lora: bool) -> bool:
        # what shares a scale with others must have its weight before it is quantised
        return has_lora or self.granularity != "token"

    def operands(self, shape: CallShape) -> tuple[WorkspaceSpec, ...]:
        element, scale, kind, config = self.functions.dtype, self.scale_dtype, self.granularity, shape.config
        width, inner, dynamic = padded(config.hidden_size), padded(config.intermediate_size), kind != "static"
        rows, pairs = shape.rows, shape.pairs
        scattered = pairs if self.scatters and not shape.batched else 0
        found = kind == "tensor" or (not dynamic and self.functions.flags_nan)
        return (
            *quantized("x", rows if dynamic or shape.batched else 0, width, element, scale),
            WorkspaceSpec("x_amax", (rows if found else 0,), torch.int32),
            *quantized("sorted", scattered, width, element, scale),
            WorkspaceSpec("amax", (max(pairs, 2),), torch.int32),
            WorkspaceSpec("h", (pairs if dynamic or config.is_lora_enabled else 0, inner), shape.wide),
            *quantized("h", pairs, inner, element, scale),
        )

    # -------------------------------------------------------------- what a call makes of it

    def _quantizes_on_load(self, call: Call) -> bool:
        """Whether rows are few, and may be quantised while they are loaded."""
        functions = self.functions
        loads = functions.load_unquantized is not None and (functions.static_on_load or self.granularity != "static")
        return self.quantize_on_load and loads and call.plan.block_m <= MAX_ROWS_QUANTIZED_ON_LOAD

    def _quantizes_h_on_load(self, call: Call) -> bool:
        few_launches = call.plan.gemm1.split_k > 1  # where launches are a good part of the time
        # one scale for all says nothing of a row, and who loads a part of it can't know
        kinds = ("token",) if self.functions.flags_nan else ("token", "tensor")
        return self.granularity in kinds and self._quantizes_on_load(call) and (few_launches or call.w2.k > MAX_SHORT)

    def _amax(self, call: Call) -> Tensor | None:
        """Largest magnitudes of h, per row or [1]; or NaN flags of rows that hold a NaN."""
        amax, kind = call.workspace["amax"], self.granularity
        if kind == "tensor":
            return amax[:1]
        wanted = self.functions.flags_nan if kind == "static" else self._quantizes_h_on_load(call)
        return amax[: call.pairs] if wanted else None

    def _rows(
        self,
        call: Call,
        values: Tensor,
        scales: Tensor,
        which: int,
        nan_flags: Tensor | None = None,
        by_row: bool = True,
    ) -> OperandA:
        """Operand A of 8-bit values, or of others, which are quantised while they are loaded.

        ``scales`` of rows, or of experts or all; of values to be quantised they may be the bits of largest magnitudes.
        """
        by_expert = 1 if self.granularity == "static" and not by_row else 0
        arguments = (values, scales, values.stride(0), int(by_row), by_expert, nan_flags)
        if values.dtype is self.functions.dtype:
            return OperandA(arguments, which, warp_specialised=(scales, 1 if by_row else None, nan_flags))
        codes = call.workspace["h_values"]
        return OperandA((*arguments, values.shape[1], codes), which, form="unquantized")

    # -------------------------------------------------------------- x

    def quantize_x(self, call: Call) -> tuple[Order, OperandA]:
        if isinstance(call.routing, Batch):
            return self._batched_x(call, call.routing)
        # the warp-specialised kernel wants the rows of a tile side by side; a scale per expert every pair by itself
        scatters = not self._quantizes_on_load(call) and (
            self.granularity == "static" or call.warp_specialises(call.plan.gemm1, call.w13)
        )
        return self._scattered_x(call, call.routing) if scatters else self._x_by_token(call, call.routing)

    def _zeroed(self, call: Call) -> Tensor | None:
        """What is to be cleared before gemm1."""
        return call.workspace["amax"][:2] if self.granularity == "tensor" else self._amax(call)

    def _x_by_token(self, call: Call, routing: Routing) -> tuple[Order, OperandA]:
        """Quantised beside the sort or behind it, or left as it is."""
        x, work, zero, which = call.x, call.workspace, self._zeroed(call), TOKEN.value
        if call.x_scale is not None:
            return call.order(zero=zero), self._rows(call, x, call.x_scale, which)
        values, found = work["x_values"], work["x_scales"]
        if self.granularity == "static":
            if self.x_scale is None:
                raise TypeError("static activations have scales")
            nan_flags = work["x_amax"] if self.functions.flags_nan else None
            flagging = (
                None
                if nan_flags is None
                else QuantizeRows(x, None, nan_flags, device.row_nan_flags, whole_row(x.shape[1]))
            )
            return call.order(flagging, zero=zero), self._rows(call, x, self.x_scale, which, nan_flags, by_row=False)
        if self.granularity == "token" or x.shape[0] == 1:
            job = QuantizeRows(x, values, found, self.functions.quantize_row, whole_row(values.shape[1]), (values,))
            order = call.order(job, zero=zero)
        else:
            order, amax = self._order_with_amax(call, routing)
            quantize_rows(self._job(x, values, found, None, *amax), routed_tokens(routing), pdl=call.plan.pdl)
        return order, self._rows(call, values, found, which)

    def _scattered_x(self, call: Call, routing: Routing) -> tuple[Order, OperandA]:
        """Quantised into the sorted order: an expert's own scale costs nothing then."""
        work = call.workspace
        amax: tuple[Tensor | None, int] = (None, 0)
        values, found = work["sorted_values"][: call.pairs], work["sorted_scales"]
        if self.granularity == "tensor":
            order, amax = self._order_with_amax(call, routing, positions=True)
        else:
            order = call.order(positions=True, zero=self._zeroed(call))
        job = self._job(call.x, values, found, self.x_scale, *amax)
        call.scattered(job, by_expert=self.granularity == "static", order=order)
        return order, self._rows(call, values, found, POSITION.value)

    def _order_with_amax(
        self, call: Call, routing: Routing, positions: bool = False
    ) -> tuple[Order, tuple[Tensor | None, int]]:
        """The order, and the magnitudes of x as `quantize_by_amax` takes them."""
        x, work = call.x, call.workspace
        raised = work["amax"][1:2] if clears_first(call.pairs) else None
        found = work["x_amax"]
        arguments = (x.shape[0], routed_tokens(routing)[1], raised)
        job = QuantizeRows(x, None, found, device.row_amax, whole_row(x.shape[1]), arguments)
        order = call.order(job, positions=positions, zero=self._zeroed(call))
        return order, ((raised, 1) if raised is not None else (found, x.shape[0]))

    def _batched_x(self, call: Call, batch: Batch) -> tuple[Order, OperandA]:
        """Quantised where it is."""
        x, work, pdl = call.x, call.workspace, call.plan.pdl
        values, found, amax = work["x_values"], work["x_scales"], work["amax"][1:2]
        job = self._job(x, values, found, self.x_scale, amax, 1)
        if self.granularity == "tensor":
            order, in_use = call.order(zero=self._zeroed(call)), rows_by_pair(batch)
            find_amax(x, amax, in_use, pdl=pdl)
            quantize_rows(job, in_use, pdl=pdl)
        else:
            order = call.order(job, zero=self._zeroed(call))
        return order, self._rows(call, values, found, POSITION.value)

    def _job(
        self, x: Tensor, values: Tensor, scales: Tensor, static: Tensor | None, amax: Tensor | None, parts: int
    ) -> QuantizeRows:
        """Rows of ``x`` that become ``values``, with a scale for each."""
        arguments: tuple[Any, ...]
        quantize, arguments = device.quantize_by_amax, (values, amax, parts)
        if self.granularity == "static":
            quantize, arguments = self.functions.quantize_static, (values, static)
        elif self.granularity == "token":
            quantize, arguments = self.functions.quantize_row, (values,)
        return QuantizeRows(x, values, scales, quantize, whole_row(values.shape[1]), arguments)

    # -------------------------------------------------------------- h

    def _in_epilogue(self, call: Call) -> bool:
        """Whether gemm1's epilogue quantises h; adapters read it before that."""
        return self.granularity == "static" and call.adapters is None

    def result(self, call: Call) -> Result:
        work, amax = call.workspace, self._amax(call)
        if self._in_epilogue(call):
            values, kind = work["h_values"], constant("" if amax is None else "nan")
            quantize, arguments = self.functions.quantize_static, (values, self.h_scale)
            static = constant("static")
            return Result.of(values, quantize=quantize, quant_args=arguments, amax=amax, amax_kind=kind, kind=static)
        if self.granularity == "static":
            amax = None
        kind = "" if amax is None else "row" if self.granularity == "token" else "tensor"
        return Result.of(work["h"], amax=amax, amax_kind=constant(kind))

    def h(self, call: Call, order: Order, which: int) -> OperandA:
        work, amax = call.workspace, self._amax(call)
        values, wide, found = work["h_values"], work["h"], work["h_scales"]
        if self._in_epilogue(call) and self.h_scale is not None:
            return self._rows(call, values, self.h_scale, which, amax, by_row=False)
        if self._quantizes_h_on_load(call) and amax is not None:
            return self._rows(call, wide, amax, which, by_row=self.granularity == "token")
        job = self._job(wide[: call.pairs], values, found, self.h_scale, amax, 1)
        in_use = rows_by_pair(call.routing) if which == call.by_pair else sorted_rows(order, call.routing)
        quantize_rows(job, in_use, pdl=call.plan.pdl)
        return self._rows(call, values, found, which)
