"""A fused MoE layer of one-byte elements: scales per channel or tensor of the weights, per token or tensor of the rest.

Few rows per expert:

    sort      pairs by expert; beside it x is quantised, or its largest magnitude found   (one launch, two for many)
    quantise  x, where all its rows share a dynamic scale
    up        h = act(x w13^T), static: quantised in the epilogue; dynamic: 16 bits and its largest magnitudes
    down      y[pair] = weight * (h w2^T); h is quantised while it is loaded
    reduce    out[token] = sum over slots of y, in float32

Many: both products read bytes.  On Hopper, and for static scales, x is quantised into the sorted order, and h by a
launch between the products (static: by the epilogue).  The batched format has no sort and no reduce, its rows stay
where they are.  The element type is a value, `RowFunctions`: `moe_core.gemm.rows_e4m3.E4M3`,
`moe_int8.kernels.rows.INT8`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from moe_core.gemm import rows as device
from moe_core.gemm.hopper_launch import HopperResult, hopper_fits, hopper_product
from moe_core.gemm.launch import (
    Activation,
    Addition,
    Operand,
    Result,
    Routing,
    TileFunctions,
    combine_parts,
    grouped_product,
)
from moe_core.gemm.lora import Adapters
from moe_core.gemm.plan import TileConfig, TilePlan
from moe_core.gemm.rows_launch import find_amax, ordered_rows, quantize_rows, routed_pairs, routed_tokens, row_operand
from moe_core.gemm.spread import spread_rows
from moe_core.gemm.tile_kernel import PAIR, POSITION, TOKEN
from moe_core.lora import LoRA
from moe_core.ops.batch import Batch, BatchedRows, batch_rows
from moe_core.ops.reduce import reduce_pairs
from moe_core.ops.sort import QuantizeRows, SortedPairs, clears_first, sort_pairs, whole_row

#: columns of one program that finishes a split product
BLOCK = 128
#: rows of a tile up to which values may be quantised while they are loaded
MAX_RAW_ROWS = 32
#: columns of h up to which programs are so short that a launch of its own quantises it faster
MAX_SHORT = 512


@dataclass(frozen=True, eq=False)
class RowFunctions:
    """An element type of one byte, by its `@triton.jit` functions; see `moe_core.gemm.tile_kernel`.

    - ``multiply``: the product of a step, added to a sum of the type ``accumulate``
    - ``quantize_row`` (its own scale), ``quantize_static`` (a tile of one expert) and ``quantize_static_rows`` (rows of
      several), ``quantize_by_amax`` (one scale for all rows)
    - ``open_raw``, ``load_raw``, and by static scales ``load_raw_static``: rows that are quantised while they are
      loaded; None where they cannot be
    - ``specialised``: gives the k loop for `moe_core.gemm.hopper`, imported on use; None: there is none
    - ``open_values``, ``load_values``, ``open_weights``, ``load_weights``, ``finish``, ``prefetch_weights`` (or None):
      those of `moe_core.gemm.rows`, or what goes with other scales and weights
    - ``marks``: values have no NaN: what `open_values` takes ends with marks of rows; see `moe_core.gemm.rows.marked`
    - ``packed``: weights of so many columns lie in a byte; ``block_k``: depth of a step, 128 or a divisor of it
    """

    dtype: torch.dtype
    multiply: Any
    quantize_row: Any
    quantize_static: Any
    quantize_static_rows: Any
    quantize_by_amax: Any = None
    open_raw: Any = None
    load_raw: Any = None
    load_raw_static: Any = None
    specialised: Callable[[], Any] | None = None
    open_values: Any = device.open_values
    load_values: Any = device.load_values
    open_weights: Any = device.open_weights
    load_weights: Any = device.load_weights
    prefetch_weights: Any = device.prefetch_weights
    finish: Any = device.finish
    accumulate: Any = tl.float32
    packed: int = 1
    block_k: int = 128
    marks: bool = False


@dataclass(frozen=True, eq=False)
class ActivationScales:
    """How x and h are quantised: ``kind`` "token", "tensor" (both dynamic) or "static" with scales [E]."""

    kind: str
    x: Tensor | None = None
    h: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Rows:
    """Operand A of a product: the arguments of `open_values` or, ``raw``, of `open_raw`; which rows (`A_ROWS`)."""

    arguments: tuple[Any, ...]
    which: int
    raw: bool = False


@dataclass(frozen=True, eq=False)
class _Layer:
    """One call."""

    functions: RowFunctions
    x: Tensor
    up: Operand
    down: Operand
    scales: ActivationScales
    routing: Routing | Batch
    plan: TilePlan
    activation: Activation
    workspace: Mapping[str, Tensor]
    raw: bool
    adapters: Adapters | None = None

    @property
    def few(self) -> bool:
        return self.raw and self.plan.block_m <= MAX_RAW_ROWS

    @property
    def raw_h(self) -> bool:
        """Whether the down product quantises h while it loads it."""
        few_launches = self.plan.up.split > 1  # where launches are a good part of the time
        # one scale for all says nothing of a row, and who loads a part of it can't know
        kinds = ("token",) if self.functions.marks else ("token", "tensor")
        return self.scales.kind in kinds and self.few and (few_launches or self.down.columns > MAX_SHORT)

    @property
    def pairs(self) -> int:
        return self.routing.num_pairs

    @property
    def amax(self) -> Tensor | None:
        """Of h, per row or [1]."""
        kind, amax = self.scales.kind, self.workspace["amax"]
        if kind == "static" or (kind == "token" and not self.raw_h):
            return None
        return amax[: self.pairs] if kind == "token" else amax[:1]

    @property
    def amax_kind(self) -> str:
        return "row" if self.scales.kind == "token" else "tensor"

    @property
    def x_amax(self) -> Tensor:
        return self.workspace["amax"][1:2]

    @property
    def load_raw(self) -> Any:
        return self.functions.load_raw_static if self.scales.kind == "static" else self.functions.load_raw

    @property
    def marks(self) -> Tensor | None:
        """Of rows of h that hold a NaN, where neither their codes nor their scales say it."""
        return self.workspace["amax"][: self.pairs] if self.scales.kind == "static" and self.functions.marks else None

    def operand(self, arguments: tuple[Any, ...], which: int, marks: Tensor | None = None, raw: bool = False) -> _Rows:
        """Rows of A, with ``marks`` where functions take them."""
        return _Rows((*arguments, marks) if raw or self.functions.marks else arguments, which, raw)

    def run(self, out: Tensor) -> None:
        """out [M, K]; batched: [E * T_max, K]."""
        routing, pdl = self.routing, self.plan.pdl
        order, a = self.quantized_x()
        y = out if isinstance(routing, Batch) else self.workspace["y"]
        split = self.plan.down.split
        if split > 1:
            y = self.workspace["parts"][: self.pairs * split * self.down.rows].view(-1, self.down.rows)
        h = self.up_product(order, a)
        added = None if self.adapters is None else self.adapters.addition("w2", self.workspace["h"], by_pair=True)
        self.product(self.plan.down, self.down, order, h, Result(y), None, added)
        if isinstance(routing, Routing):
            reduce_pairs(y, routing.ids, routing.num_experts, out, expert_map=routing.expert_map, split=split, pdl=pdl)

    # -------------------------------------------------------------- x

    def quantized_x(self) -> tuple[SortedPairs | BatchedRows, _Rows]:
        if isinstance(self.routing, Batch):
            return self.batched_x(self.routing)
        # the device's own kernel wants the rows of a tile side by side; a scale per expert wants every pair by itself
        sorted_first = not self.few and (self.scales.kind == "static" or self.specialises(self.plan.up, self.up))
        return self.sorted_x(self.routing) if sorted_first else self.x_by_token(self.routing)

    def specialises(self, config: TileConfig, b: Operand) -> bool:
        return self.functions.specialised is not None and self.adapters is None and hopper_fits(config, b)

    def zeroed(self) -> Tensor | None:
        """What is to be cleared before the first product."""
        kind, amax = self.scales.kind, self.workspace["amax"]
        return amax[:2] if kind == "tensor" else self.marks if kind == "static" else self.amax

    def x_by_token(self, routing: Routing) -> tuple[SortedPairs, _Rows]:
        """Quantised beside the sort or behind it, or raw."""
        x, kind, work = self.x, self.scales.kind, self.workspace
        values, found = work["x_values"], work["x_scales"]
        a = self.operand((values, found, values.stride(0), 1, 0), TOKEN.value)
        if kind == "static":
            marks = work["x_amax"] if self.functions.marks else None
            marking = None if marks is None else QuantizeRows(x, None, marks, device.row_marks, whole_row(x.shape[1]))
            arguments = (x, self.scales.x, x.stride(0), 0, 1, x.shape[1])
            return self.sort(routing, marking), self.operand(arguments, TOKEN.value, marks, raw=True)
        if kind == "token" or x.shape[0] == 1:
            job = QuantizeRows(x, values, found, self.functions.quantize_row, whole_row(values.shape[1]))
            return self.sort(routing, job), a
        order, arguments = self.sort_with_amax(routing)
        in_use = routed_tokens(routing)
        quantize_rows(x, values, found, self.functions.quantize_by_amax, arguments, in_use, pdl=self.plan.pdl)
        return order, a

    def sorted_x(self, routing: Routing) -> tuple[SortedPairs, _Rows]:
        """Quantised into the sorted order: an expert's own scale costs nothing then."""
        x, kind, work = self.x, self.scales.kind, self.workspace
        values, found = work["sorted_values"][: self.pairs], work["sorted_scales"]
        quantize, arguments = self.row_quantizer()
        if kind == "tensor":
            order, arguments = self.sort_with_amax(routing, positions=True)
        else:
            order = self.sort(routing, None, positions=True)
        job = QuantizeRows(x, values, found, quantize, whole_row(values.shape[1]), arguments)
        spread_rows(job, pairs=order, routing=routing, by_expert=kind == "static", pdl=self.plan.pdl)
        return order, self.operand((values, found, values.stride(0), 1, 0), POSITION.value)

    def sort(self, routing: Routing, job: QuantizeRows | None, positions: bool = False) -> SortedPairs:
        return sort_pairs(
            routing.ids,
            routing.num_experts,
            self.plan.block_m,
            workspace=self.workspace,
            expert_map=routing.expert_map,
            rows=job,
            positions=positions,
            zero=self.zeroed(),
            pdl=self.plan.pdl,
        )

    def sort_with_amax(self, routing: Routing, positions: bool = False) -> tuple[SortedPairs, tuple[Any, ...]]:
        """Sort, and the magnitudes of x as `quantize_by_amax` takes them."""
        x, work = self.x, self.workspace
        raised = self.x_amax if clears_first(self.pairs) else None
        found = work["x_amax"]
        arguments = (x.shape[0], routed_tokens(routing)[1], raised)
        job = QuantizeRows(x, None, found, device.row_amax, whole_row(x.shape[1]), arguments)
        order = self.sort(routing, job, positions)
        return order, ((raised, 1) if raised is not None else (found, x.shape[0]))

    def batched_x(self, batch: Batch) -> tuple[BatchedRows, _Rows]:
        """Quantised where it is."""
        x, kind, work, pdl = self.x, self.scales.kind, self.workspace, self.plan.pdl
        values, found = work["x_values"], work["x_scales"]
        quantize, arguments = self.row_quantizer()
        job = None
        if kind != "tensor":
            job = QuantizeRows(x, values, found, quantize, whole_row(values.shape[1]), arguments)
        order = batch_rows(batch, self.plan.block_m, workspace=work, rows=job, zero=self.zeroed(), pdl=pdl)
        if kind == "tensor":
            in_use = ordered_rows(order, batch)
            find_amax(x, self.x_amax, in_use, pdl=pdl)
            quantize_rows(x, values, found, quantize, arguments, in_use, pdl=pdl)
        return order, self.operand((values, found, values.stride(0), 1, 0), POSITION.value)

    def row_quantizer(self) -> tuple[Any, tuple[Any, ...] | None]:
        """Device function and arguments for rows of x, with a scale for each row."""
        functions = self.functions
        if self.scales.kind == "static":
            return functions.quantize_static_rows, (self.scales.x,)
        if self.scales.kind == "token":
            return functions.quantize_row, None
        return functions.quantize_by_amax, (self.x_amax, 1)

    # -------------------------------------------------------------- products

    def product(
        self,
        config: TileConfig,
        b: Operand,
        order: SortedPairs | BatchedRows,
        a: _Rows,
        out: Result,
        activation: Activation | None,
        added: Addition | None = None,
    ) -> None:
        if self.specialises(config, b) and a.which == POSITION.value and not a.raw:
            self.hopper_product(config, b, order, a, out, activation)
            return
        functions = self.functions
        grouped_product(
            TileFunctions(
                functions.open_raw if a.raw else functions.open_values,
                self.load_raw if a.raw else functions.load_values,
                functions.open_weights,
                functions.load_weights,
                functions.multiply,
                functions.finish,
                functions.prefetch_weights if b.aligned and b.columns % 16 == 0 else None,
                functions.accumulate,
            ),
            config,
            a=a.arguments,
            b=b,
            out=out,
            pairs=order,
            routing=self.routing,
            activation=activation,
            block_k=functions.block_k,
            pdl=self.plan.pdl,
            a_rows=a.which,
            out_rows=PAIR.value if self.adapters is not None and activation is not None else None,
            added=added,
        )

    def hopper_product(
        self,
        config: TileConfig,
        b: Operand,
        order: SortedPairs | BatchedRows,
        a: _Rows,
        out: Result,
        activation: Activation | None,
    ) -> None:
        """The same by the device's own kernel."""
        multiply = self.functions.specialised() if self.functions.specialised is not None else None
        values, scales, _, by_row, _, *marks = a.arguments
        weights, weight_scales, _, _, *strides = b.device
        static = None if out.arguments is None else out.arguments[0]
        hopper_product(
            config,
            multiply=multiply,
            values=values[: self.pairs],
            scales=(scales, by_row or None, *(marks or (None,))),
            weights=weights,
            weight_scales=(weight_scales, *strides),
            b=b,
            out=HopperResult(out.values, "values" if static is None else "static", static, out.amax, out.amax_kind),
            pairs=order,
            routing=self.routing,
            activation=activation,
            pdl=self.plan.pdl,
        )

    def up_product(self, order: SortedPairs | BatchedRows, a: _Rows) -> _Rows:
        """h, as the down product reads it."""
        config, work, static = self.plan.up, self.workspace, self.scales.h
        values, wide = work["h_values"], work["h"]
        added = None if self.adapters is None else self.adapters.addition("w13", self.x, by_pair=False)
        if static is not None and added is None:
            marks = self.marks
            kind = "" if marks is None else "nan"
            h = Result(values, None, self.functions.quantize_static, (static,), amax=marks, amax_kind=kind)
        else:
            amax = self.amax
            h = Result(wide, amax=amax, amax_kind="" if amax is None else self.amax_kind)
        # adapters have an order of their own
        which = (POSITION if added is None else PAIR).value
        if config.split > 1 and isinstance(self.routing, Routing):
            which = PAIR.value
            width = self.up.rows * (2 if self.activation.gated else 1)
            parts = work["parts"][: self.pairs * config.split * width].view(-1, width)
            self.product(config, self.up, order, a, Result(parts), self.activation, added)
            combine_parts(
                parts=parts,
                split=config.split,
                bias=self.up.bias,
                out=h,
                routing=self.routing,
                activation=self.activation,
                columns=self.up.rows,
                block=BLOCK,
                pdl=self.plan.pdl,
                added=added,
            )
        else:
            self.product(config, self.up, order, a, h, self.activation, added)
        if static is not None and added is None:
            return self.operand((values, static, values.stride(0), 0, 1), which, self.marks)
        if self.raw_h:
            by_row = 1 if self.scales.kind == "token" else 0
            return self.operand((wide, self.amax, wide.stride(0), by_row, 0, wide.shape[1]), which, raw=True)
        quantize: Any = self.functions.quantize_row
        arguments: tuple[Any, ...] | None = None
        if self.scales.kind == "tensor":
            quantize, arguments = self.functions.quantize_by_amax, (self.amax, 1)
        if static is not None:
            quantize, arguments = self.functions.quantize_static_rows, (static,)
        found = work["h_scales"]
        quantize_rows(
            wide[: self.pairs],
            values,
            found,
            quantize,
            arguments,
            routed_pairs(self.routing)
            if which == PAIR.value and isinstance(self.routing, Routing)
            else ordered_rows(order, self.routing),
            pdl=self.plan.pdl,
        )
        return self.operand((values, found, values.stride(0), 1, 0), which)


def row_fused_moe(
    functions: RowFunctions,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    w13_scale: Tensor,
    w2_scale: Tensor,
    activation_scales: ActivationScales,
    out: Tensor,
    workspace: Mapping[str, Tensor],
    plan: TilePlan,
    activation: Activation,
    topk_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    expert_num_tokens: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    raw: bool = True,
    w13_extra: tuple[Any, ...] = (),
    w2_extra: tuple[Any, ...] = (),
    lora: LoRA | None = None,
) -> None:
    """Write the layer's output to ``out`` [M, K]: sum over slots of weight * (w2 act(w13 x + b13) + b2).

    - ``x`` [M, K] bfloat16, float16 or float32, columns contiguous, any row stride; ``out`` [M, K] likewise
    - ``w13`` [E, 2N, K] (gate rows, then up rows; [E, N, K] without a gate), ``w2`` [E, K, N] of the type of
      ``functions``, columns contiguous
    - ``w13_scale`` [E, 2N, 1] and ``w2_scale`` [E, K, 1], or [E, 2] ([E, 1] without a gate) and [E, 1], float32
    - ``topk_ids`` [M, k] int32 or int64, ``topk_weights`` [M, k] float32, both contiguous; an id that is negative, too
      large, or mapped by ``expert_map`` [E global] int32 to no local expert adds nothing
    - or, batched: ``expert_num_tokens`` [E] int32; ``x`` and ``out`` [E, T_max, K], rows beyond an expert's number are
      neither read nor written, and results are not weighted
    - ``workspace``: the tensors of `moe_core.gemm.workspaces.row_workspaces`, by name, for at least M tokens
    - ``plan``: launch parameters; tiles of the up product are 128 columns wide or a multiple
    - ``w13_bias`` [E, 2N] or [E, N], ``w2_bias`` [E, K], any float dtype
    - ``apply_router_weight_on_input``: weights multiply x instead of the expert's output (k = 1)
    - ``raw``: few rows may be quantised while they are loaded (if ``functions`` can)
    - ``lora``: adapters, with the number of each token's (batched: row's); needs its workspaces too
    - ``w13_extra``, ``w2_extra``: what ``functions`` read of the weights besides; see `row_operand`

    A dynamic scale per tensor spans the tokens, then the pairs, that have a local expert, as far as they are finite.
    """
    experts, size, hidden = w13.shape[0], w13.shape[1] // (2 if activation.gated else 1), w2.shape[1]
    routing: Routing | Batch
    if expert_num_tokens is not None:
        routing = Batch(expert_num_tokens, x.shape[1])
        x, out = x.flatten(0, 1), out.flatten(0, 1)
    elif topk_ids is not None and topk_weights is not None:
        routing = Routing(topk_ids, topk_weights, experts, expert_map, apply_router_weight_on_input)
        if apply_router_weight_on_input and (activation_scales.kind != "token" or lora is not None):
            # what shares a scale with others must have its weight before it is quantised; adapters read it too
            x = torch.mul(x, topk_weights, out=workspace["x_weighted"][: x.shape[0]])
            routing = Routing(topk_ids, None, experts, expert_map)
    else:
        raise TypeError("either topk_weights and topk_ids or expert_num_tokens are needed")
    if x.shape[0] == 0:
        return
    up = row_operand(w13, w13_scale, w13_bias, size, w13_extra, columns=hidden, packed=functions.packed)
    down = row_operand(w2, w2_scale, w2_bias, hidden, w2_extra, columns=size, packed=functions.packed)
    loads = functions.load_raw_static if activation_scales.kind == "static" else functions.load_raw
    raw = raw and loads is not None
    adapters = None
    if lora is not None:
        plan = replace(plan, pdl=False)  # their launches lie between
        adapters = Adapters(lora, routing, workspace)
    _Layer(functions, x, up, down, activation_scales, routing, plan, activation, workspace, raw, adapters).run(out)
