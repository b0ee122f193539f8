"""The fused MoE layer, from hidden states to the layer's output; every scheme runs through this pipeline.

    sort       (token, expert) pairs by expert; beside it x is quantised          one launch, two for many pairs
    gemm1      h = act(x w13^T + b13), quantised in the epilogue where it can be
    gemm2      y[pair] = weight * (h w2^T + b2)
    finalize   out[token] = sum over its pairs of y, in float32

In the batched format rows arrive grouped by expert: there is neither sort nor finalize, gemm2 writes the output.  With
few tokens several programs share the k loop of a tile (split-K); for gemm1 a further launch adds their partials up,
activates and quantises.  Router weights multiply gemm2's result, or x (`apply_router_weight_on_input`).  LoRA deltas
are added before the bias.

What differs among schemes are typed, frozen objects that are made once, when the layer is: two weights
(`moe_core.gemm.launch.GemmWeight`) and an activation scheme (`moe_core.gemm.fused.scheme`).  All scratch memory is the
caller's, nothing is read before it is written, and there is no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_core.gemm.fused.scheme import ActivationScheme, Order, Rows
from moe_core.gemm.hopper_launch import hopper_fits, hopper_gemm
from moe_core.gemm.launch import (
    Activation,
    GemmWeight,
    LoRADelta,
    Result,
    Routing,
    grouped_gemm,
    reduce_split_k,
)
from moe_core.gemm.lora import Adapters
from moe_core.gemm.plan import TileConfig, TilePlan
from moe_core.gemm.tile_kernel import PAIR, POSITION
from moe_core.lora import LoRA
from moe_core.ops.batch import Batch, batch_rows
from moe_core.ops.reduce import reduce_pairs
from moe_core.ops.sort import QuantizeRows, sort_pairs

if TYPE_CHECKING:
    from moe_core.gemm.marlin.gemv import GemvLayer


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """What a layer's calls share: ``w13`` (gate rows, then up rows, or in turns) and ``w2``, scheme and activation.

    ``gemv``: the same layer for one token, without tensor cores, where the family has one.
    """

    w13: GemmWeight
    w2: GemmWeight
    scheme: ActivationScheme
    activation: Activation
    gemv: GemvLayer | None = None

    def __call__(
        self,
        x: Tensor,
        out: Tensor,
        *,
        routing: Routing | Batch,
        plan: TilePlan,
        workspace: Mapping[str, Tensor],
        lora: LoRA | None = None,
    ) -> None:
        """Write the layer's output to ``out`` [M, K]: sum over slots of weight * (w2 act(w13 x + b13) + b2).

        - ``x`` [M, K] bfloat16, float16 or float32, columns contiguous, any row stride; ``out`` [M, K] likewise
        - ``routing``: an id that is negative, too large, or mapped to no local expert adds nothing
        - or a `Batch`: ``x`` and ``out`` [E, T_max, K]; rows beyond an expert's number are neither read nor written,
          results are not weighted, and the plan splits no loops
        - ``workspace``: the tensors of the scheme's ``workspaces``, by name, for at least M tokens
        - ``lora``: adapters, with the number of each token's (batched: row's)
        """
        if isinstance(routing, Batch):
            x, out = x.flatten(0, 1), out.flatten(0, 1)
        elif routing.weights is not None and routing.weight_on_input and self.scheme.weights_first(lora is not None):
            x = torch.mul(x, routing.weights, out=workspace["x_weighted"][: x.shape[0]])
            routing = replace(routing, weights=None, weight_on_input=False)
        if not x.shape[0]:
            return
        adapters = None
        if lora is not None:
            # launches of the adapters lie between those of the layer
            plan = TilePlan(self.w13.tile_config(plan.gemm1), self.w2.tile_config(plan.gemm2))
            adapters = Adapters(lora, routing, workspace)
        call = Call(self, x, routing, plan, workspace, adapters)
        order, a = self.scheme.quantize_x(call)
        a = call.gemm1(order, a)
        y, split = call.gemm2(order, a, out)
        if isinstance(routing, Routing):
            expert_map = routing.expert_map
            reduce_pairs(y, routing.ids, routing.num_experts, out, expert_map=expert_map, split=split, pdl=plan.pdl)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer; ``x`` [rows, K]."""

    layer: FusedLayer
    x: Tensor
    routing: Routing | Batch
    plan: TilePlan
    workspace: Mapping[str, Tensor]
    adapters: Adapters | None

    @property
    def pairs(self) -> int:
        """Rows of h; batched: of all buffers."""
        return self.routing.num_pairs

    @property
    def by_pair(self) -> int:
        """What a row of a tensor by pair is to the tile kernel; batched rows are all the same."""
        found: int = (PAIR if isinstance(self.routing, Routing) else POSITION).value
        return found

    def order(self, rows: QuantizeRows | None = None, *, positions: bool = False, zero: Tensor | None = None) -> Order:
        """Sort the pairs (batched: list the tiles), and quantise ``rows`` and clear ``zero`` beside that."""
        routing, plan, work = self.routing, self.plan, self.workspace
        if isinstance(routing, Batch):
            return batch_rows(routing, plan.block_m, workspace=work, rows=rows, zero=zero, pdl=plan.pdl)
        return sort_pairs(
            routing.ids,
            routing.num_experts,
            plan.block_m,
            workspace=work,
            expert_map=routing.expert_map,
            rows=rows,
            positions=positions,
            zero=zero,
            pdl=plan.pdl,
        )

    def warp_specialises(self, config: TileConfig, weight: GemmWeight) -> bool:
        """Whether the warp-specialised kernel computes a GEMM whose rows lie as it wants them."""
        return weight.warp_specialised is not None and self.adapters is None and hopper_fits(config, weight)

    def gemm1(self, order: Order, a: Rows) -> Rows:
        """h as operand A of gemm2."""
        layer, config, routing = self.layer, self.plan.gemm1, self.routing
        weight, activation = layer.w13, layer.activation
        lora = None if self.adapters is None else self.adapters.delta("w13", self.x, by_pair=False)
        # the rows of adapters have an order of their own
        by_pair = self.by_pair if lora is not None or layer.scheme.h_by_pair else POSITION.value
        h = layer.scheme.result(self)
        if config.split_k > 1 and isinstance(routing, Routing):
            by_pair = PAIR.value
            partials = self.partials(config.split_k, weight.n * (2 if activation.gated else 1))
            self.product(config, weight, order, a, Result(partials), activation, by_pair, lora)
            reduce_split_k(
                partials=partials,
                split=config.split_k,
                bias=weight.bias,
                out=h,
                routing=routing,
                activation=activation,
                columns=weight.n,
                block=h.block,
                pdl=self.plan.pdl,
                lora=lora,
            )
        else:
            self.product(config, weight, order, a, h, activation, by_pair, lora)
        return layer.scheme.h(self, order, by_pair)

    def gemm2(self, order: Order, a: Rows, out: Tensor) -> tuple[Tensor, int]:
        """(y [pairs * split, K], split); batched: the output itself."""
        weight, config = self.layer.w2, self.plan.gemm2
        lora = None if self.adapters is None else self.adapters.delta("w2", self.workspace["h"], by_pair=True)
        y = out
        if isinstance(self.routing, Routing):
            y = self.workspace["y"] if config.split_k == 1 else self.partials(config.split_k, weight.n)
        self.product(config, weight, order, a, Result(y), None, PAIR.value, lora)
        return y, config.split_k

    def partials(self, split: int, columns: int) -> Tensor:
        """[pairs * split, columns] float32 of programs that share k loops."""
        return self.workspace["partials"][: self.pairs * split * columns].view(-1, columns)

    def product(
        self,
        config: TileConfig,
        weight: GemmWeight,
        order: Order,
        a: Rows,
        out: Result,
        activation: Activation | None,
        out_rows: int,
        lora: LoRADelta | None,
    ) -> None:
        """One GEMM, by the warp-specialised kernel where that fits, else by the tile kernel."""
        if a.warp_specialised is not None and a.which == POSITION.value and self.warp_specialises(config, weight):
            hopper_gemm(
                config,
                weight=weight,
                values=a.arguments[0][: self.pairs],
                scales=a.warp_specialised,
                out=out,
                pairs=order,
                routing=self.routing,
                activation=activation,
                pdl=self.plan.pdl,
            )
            return
        config = weight.tile_config(config)
        grouped_gemm(
            weight.functions(config, a),
            config,
            a=a.arguments,
            b=weight,
            out=out,
            pairs=order,
            routing=self.routing,
            activation=activation,
            block_k=weight.block_k,
            pdl=self.plan.pdl,
            a_rows=a.which,
            out_rows=out_rows,
            aligned=a.aligned,
            lora=lora,
        )
