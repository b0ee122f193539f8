"""The checks that need a GPU: captured graphs, synchronization, allocations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from moe_core import GATED, NON_GATED, Claims, KernelWeights, any_device, apply_moe_activation
from moe_core.reference.torch_experts import TorchExperts
from moe_core.testing import Case, cases_for, run_case
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


class DenseExperts(TorchExperts):
    """Every expert on every token: no synchronization, shapes that depend on nothing but the arguments."""

    claims = Claims(
        devices=(any_device(),),
        keys=((None, None),),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16}),
        bias=True,
    )

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
        **rest: Any,
    ) -> None:
        config, quant = self.config, weights.quant_config
        ids = topk_ids.long()
        valid = (ids >= 0) & (ids < config.num_experts)
        ids = ids.clamp(0, config.num_experts - 1)
        local = ids if expert_map is None else expert_map.long()[ids]
        total = torch.zeros(output.shape, dtype=torch.float32, device=output.device)
        for expert in range(config.local_experts):
            h = hidden_states.float() @ weights.w13[expert].float().T
            if quant.w1_bias is not None:
                h += quant.w1_bias[expert].float()
            h = apply_moe_activation(config.activation, h, config.activation_params).bfloat16().float()
            y = h @ weights.w2[expert].float().T
            if quant.w2_bias is not None:
                y += quant.w2_bias[expert].float()
            factor = torch.where(valid & (local == expert), topk_weights, 0.0).sum(dim=1, keepdim=True)
            total += torch.where(factor > 0, y * factor, 0.0)
        output.copy_(total)


class Synchronizing(TorchExperts):
    """Reads token counts on the host, and claims to be capturable."""

    claims = DenseExperts.claims


class KeepsFirstInput(DenseExperts):
    """What is captured reads a copy of an earlier input."""

    kept: Tensor | None = None

    def apply(self, output: Tensor, hidden_states: Tensor, weights: KernelWeights, **named: Any) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self.kept = hidden_states.clone()
        elif self.kept is not None:
            hidden_states = self.kept
        super().apply(output, hidden_states, weights, **named)


def cases(experts: type[TorchExperts], *checks: str) -> list[Case]:
    return [case for case in cases_for(experts, device="cuda") if case.check in checks]


@pytest.mark.parametrize("check", ["values", "convert", "reload", "compile", "opcheck", "refusals", "graph", "sync"])
def test_sound_experts_pass(check: str) -> None:
    found = cases(DenseExperts, check)
    assert found
    for case in found:
        run_case(DenseExperts, case, device="cuda")


def test_allocations_are_counted() -> None:
    (case,) = cases(DenseExperts, "memory")
    with pytest.raises(AssertionError, match=r"makes \d+ allocations"):
        run_case(DenseExperts, case, device="cuda")


def test_synchronization_is_found() -> None:
    (case,) = cases(Synchronizing, "sync")
    with pytest.raises(AssertionError, match="host"):
        run_case(Synchronizing, case, device="cuda")


def test_a_graph_that_keeps_its_first_input_is_found() -> None:
    (case,) = cases(KeepsFirstInput, "graph")
    with pytest.raises(AssertionError, match="graph"):
        run_case(KeepsFirstInput, case, device="cuda")
