"""The fused MoE layer, from hidden states to output: the pipeline of all schemes.

    sort       (token, expert) pairs by expert; the same launch quantizes x       one launch, two for many pairs
    gemm1      h = act(x w13^T + b13), quantized in the epilogue where possible
    gemm2      y[pair] = weight * (h w2^T + b2)
    finalize   out[token] = sum over its pairs of y, in float32

In the batched format, rows arrive grouped by expert. Then there is neither sort nor finalize, and gemm2 writes the
output. With few tokens, several programs share the mainloop of a tile (split-K). For gemm1, another launch then adds
the partial sums, applies the activation and quantizes. Router weights multiply gemm2's result, or x
(`apply_router_weight_on_input`). LoRA deltas are added before the bias.

Schemes differ only in typed, frozen objects that are built once per layer: two weights
(`moe_core.kernels.gemm.tiles.launch.GemmWeight`) and an activation scheme (`moe_core.kernels.gemm.fused.scheme`). The
caller owns all workspace tensors. Nothing is read before it is written, and the host never synchronizes.
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
    """Layer state that all calls share.

    Attributes:
        w13: Weight of gemm1: gate rows followed by up rows, or interleaved.
        w2: Weight of gemm2.
        scheme: Activation scheme.
        activation: Activation between the GEMMs.
    """

    w13: GemmWeight
    w2: GemmWeight
    scheme: ActivationScheme
    activation: Activation

    def __call__(
        self,
        x: Tensor,
        out: Tensor,
        routing: Routing | Batch,
        plan: TilePlan,
        workspace: Mapping[str, Tensor],
        *,
        lora: LoRA | None = None,
        x_scale: Tensor | None = None,
    ) -> None:
        """Write out = sum over slots of weight * (w2 act(w13 x + b13) + b2).

        Args:
            x: [M, K] bfloat16, float16 or float32, with contiguous columns and any row stride. Batched: [E, T_max, K];
                rows beyond an expert's count are not read.
            out: [M, K], as ``x``. Batched: [E, T_max, K]; rows beyond an expert's count are not written.
            routing: Routing, or a `Batch`. An id that is negative, too large, or not mapped to a local expert adds
                nothing. Batched results are not weighted, and batched mainloops are not split.
            plan: Launch configurations.
            workspace: Tensors of the scheme's ``workspaces`` by name, for at least M tokens.
            lora: Adapters, with the adapter index of each token (batched: row), or None.
            x_scale: [M, groups]; ``x`` then holds codes in the scheme's format, of whole blocks of columns.
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
            # The launches of the adapters run between those of the layer.
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
        # The rows of adapters have a separate order.
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
        """Run the warp-specialized kernel where it is applicable, otherwise the tile kernel."""
        special, a = gemm.weight.warp_specialized, gemm.a
        if (
            special is not None
            and a.warp_specialized is not None
            and (a.which == "position" or (a.which == "token" and special.gathers))
            and call.warp_specializes(gemm.config, gemm.weight)
        ):
            (special.start or hopper_gemm)(gemm)
        else:
            grouped_gemm(gemm)
