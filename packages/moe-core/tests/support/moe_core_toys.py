"""Small experts and oracles for the tests of the interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from moe_core import (
    GATED,
    NON_GATED,
    Backend,
    Claims,
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEExpertsModular,
    FusedMoEExpertsMonolithic,
    KernelWeights,
    MoEWeights,
    Oracle,
    RoutingMethodType,
    SchemeSpec,
    any_device,
    apply_moe_activation,
    cuda,
    make_quant_config,
    route,
)
from torch import Tensor

PLAIN = Claims(
    devices=(any_device(),),
    keys=((None, None),),
    activations=GATED | NON_GATED,
    dtypes=frozenset({torch.float32, torch.bfloat16}),
    bias=True,
    apply_router_weight_on_input=True,
)


class ToyExperts(FusedMoEExpertsModular):
    """Unquantized experts, token by token."""

    claims = PLAIN
    interface_api = (1, 0)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        quant = make_quant_config(
            weight_key=None, activation_key=None, w1_bias=weights.w13_bias, w2_bias=weights.w2_bias
        )
        return KernelWeights(w13=weights.w13, w2=weights.w2, quant_config=quant)

    def one(self, x: Tensor, weights: KernelWeights, expert: int) -> Tensor:
        quant = weights.quant_config
        h = weights.w13[expert].float() @ x.float()
        h = h if quant.w1_bias is None else h + quant.w1_bias[expert].float()
        h = apply_moe_activation(self.config.activation, h, self.config.activation_params)
        y = weights.w2[expert].float() @ h
        return y if quant.w2_bias is None else y + quant.w2_bias[expert].float()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weights: KernelWeights,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        workspace: Mapping[str, Tensor],
        expert_map: Tensor | None = None,
        hidden_states_scale: Tensor | None = None,
        expert_tokens: ExpertTokensMetadata | None = None,
    ) -> None:
        output.zero_()
        if self.activation_format is FusedMoEActivationFormat.BATCHED:
            assert expert_tokens is not None
            for expert, count in enumerate(expert_tokens.expert_num_tokens.tolist()):
                for row in range(count):
                    output[expert, row] = self.one(hidden_states[expert, row], weights, expert)
            return
        for token in range(hidden_states.shape[0]):
            total = torch.zeros(self.config.hidden_size)
            for slot, expert in enumerate(topk_ids[token].tolist()):
                if not 0 <= expert < self.config.num_experts:
                    continue
                local = expert if expert_map is None else int(expert_map[expert])
                if not 0 <= local < self.config.local_experts:
                    continue
                weight = float(topk_weights[token, slot])
                on_input = self.config.apply_router_weight_on_input
                y = self.one(hidden_states[token] * (weight if on_input else 1.0), weights, local)
                if self.claims.reduces:
                    total += y * (1.0 if on_input else weight)
                else:
                    output[token, slot] = y
            if self.claims.reduces:
                output[token] = total


class UnreducedToyExperts(ToyExperts):
    claims = replace(PLAIN, reduces=False, apply_router_weight_on_input=False)


class BatchedToyExperts(ToyExperts):
    claims = replace(PLAIN, formats=frozenset({FusedMoEActivationFormat.BATCHED}))


class GpuToyExperts(ToyExperts):
    claims = replace(PLAIN, devices=(cuda(min=90),), bias=False)


class MonolithicToyExperts(FusedMoEExpertsMonolithic):
    interface_api = (1, 0)
    claims = replace(PLAIN, routing_methods=frozenset({RoutingMethodType.Renormalize}))
    convert = ToyExperts.convert

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weights: KernelWeights,
        *,
        router_logits: Tensor,
        workspace: Mapping[str, Tensor],
        correction_bias: Tensor | None = None,
        expert_map: Tensor | None = None,
        hidden_states_scale: Tensor | None = None,
    ) -> None:
        assert self.config.routing is not None
        topk_weights, topk_ids = route(
            router_logits, top_k=self.config.top_k, config=self.config.routing, correction_bias=correction_bias
        )
        inner = ToyExperts(self.config, weight_key=None, activation_key=None, device=self.device_info)
        inner.apply(
            output,
            hidden_states,
            weights,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            expert_map=expert_map,
            workspace=workspace,
        )


#: the scheme of the toys
TOY = SchemeSpec(
    "toy",
    interface_api=(1, 0),
    format_api=(1, 0),
    backends=(Backend("gpu", (GpuToyExperts,)), Backend("plain", (ToyExperts, BatchedToyExperts))),
)


def toy_oracle(**changes: Any) -> Oracle:
    """The toys' oracle; ``changes``: entries of their scheme to replace."""
    return Oracle(replace(TOY, **changes))


def toy_weights(config: FusedMoEConfig, seed: int = 0) -> MoEWeights:
    """Random unquantized weights of the local experts."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(config.dtype)

    experts, hidden, inter = config.local_experts, config.hidden_size, config.intermediate_size
    return MoEWeights(
        weight_key=None,
        activation_key=None,
        w13=make(experts, config.w13_rows, hidden),
        w2=make(experts, hidden, inter),
        w13_bias=make(experts, config.w13_rows) if config.has_bias else None,
        w2_bias=make(experts, hidden) if config.has_bias else None,
    )
