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
(`moe_core.kernels.gemm.tiles.launch.GemmWeight`) and an activation scheme (`moe_core.kernels.gemm.fused.scheme`).  All
scratch memory is the caller's, nothing is read before it is written, and there is no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_core.kernels.gemm.fused.call import Call
from moe_core.kernels.gemm.fused.scheme import ActivationScheme
from moe_core.kernels.gemm.plan import TilePlan
from moe_core.kernels.gemm.sm90.launch import hopper_gemm
from moe_core.kernels.gemm.tiles.launch import (
    Activation,
    Gemm,
    GemmWeight,
    OperandA,
    Result,
    Routing,
    grouped_gemm,
    reduce_split_k,
)
from moe_core.kernels.gemm.tiles.lora import Adapters
from moe_core.kernels.ops.batch import Batch
from moe_core.kernels.ops.reduce import reduce_pairs
from moe_core.kernels.ops.sort import Schedule
from moe_core.spec.lora import LoRA


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """What calls share: ``w13`` (gate rows, then up rows, or interleaved) and ``w2``, scheme and activation."""

    w13: GemmWeight
    w2: GemmWeight
    scheme: ActivationScheme
    activation: Activation

    def __call__(
        self,
        x: Tensor,
        out: Tensor,
        *,
        routing: Routing | Batch,
        plan: TilePlan,
        workspace: Mapping[str, Tensor],
        lora: LoRA | None = None,
        x_scale: Tensor | None = None,
    ) -> None:
        """Write the layer's output to ``out`` [M, K]: sum over slots of weight * (w2 act(w13 x + b13) + b2).

        - ``x`` [M, K] bfloat16, float16 or float32, columns contiguous, any row stride; ``out`` [M, K] likewise
        - ``routing``: an id that is negative, too large, or mapped to no local expert adds nothing
        - or a `Batch`: ``x`` and ``out`` [E, T_max, K]; rows beyond an expert's number are neither read nor written,
          results are not weighted, and there is no split-K
        - ``workspace``: the tensors of the scheme's ``workspaces``, by name, for at least M tokens
        - ``lora``: adapters, with the number of each token's (batched: row's)
        - ``x_scale`` [M, groups]: ``x`` are codes already, as the scheme makes them; of whole blocks of columns
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
            adapters = Adapters(lora, routing, workspace, uniform=plan.gemm1.uniform)
        call = Call(self.w13, self.w2, x, routing, plan, workspace, adapters, x_scale)
        order, a = self.scheme.quantize_x(call)
        a = self._gemm1(call, order, a)
        y, split_k = self._gemm2(call, order, a, out)
        if isinstance(routing, Routing):
            expert_map = routing.expert_map
            reduce_pairs(y, routing.ids, routing.num_experts, out, expert_map=expert_map, split_k=split_k, pdl=plan.pdl)

    def _gemm1(self, call: Call, order: Schedule, a: OperandA) -> OperandA:
        """h as operand A of gemm2."""
        config, routing = call.plan.gemm1, call.routing
        weight, activation = self.w13, self.activation
        lora = None if call.adapters is None else call.adapters.delta("w13", call.x, by_pair=False)
        # the rows of adapters have an order of their own
        by_pair = call.by_pair if lora is not None or self.scheme.h_by_pair else "position"
        h = result = self.scheme.result(call)
        split = config.split_k > 1 and isinstance(routing, Routing)
        if split:
            by_pair = "pair"
            result = Result.of(call.partials(config.split_k, weight.n * (2 if activation.gated else 1)))
        gemm = Gemm(config, weight, a, result, order, routing, activation, by_pair, lora, call.plan.pdl)
        self._multiply(call, gemm)
        if split:
            reduce_split_k(gemm, h)
        return self.scheme.h(call, order, by_pair)

    def _gemm2(self, call: Call, order: Schedule, a: OperandA, out: Tensor) -> tuple[Tensor, int]:
        """(y [pairs * split_k, K], split_k); batched: the output itself."""
        weight, config = self.w2, call.plan.gemm2
        lora = None if call.adapters is None else call.adapters.delta("w2", call.workspace["h"], by_pair=True)
        y = out
        if isinstance(call.routing, Routing):
            y = call.workspace["y"] if config.split_k == 1 else call.partials(config.split_k, weight.n)
        pdl = call.plan.pdl
        self._multiply(call, Gemm(config, weight, a, Result.of(y), order, call.routing, lora=lora, pdl=pdl))
        return y, config.split_k

    def _multiply(self, call: Call, gemm: Gemm) -> None:
        """By the warp-specialised kernel where that fits, else by the tile kernel."""
        special, a = gemm.weight.warp_specialised, gemm.a
        if (
            special is not None
            and a.warp_specialised is not None
            and (a.which == "position" or (a.which == "token" and special.gathers))
            and call.warp_specialises(gemm.config, gemm.weight)
        ):
            (special.start or hopper_gemm)(gemm)
        else:
            grouped_gemm(gemm)
