"""How many adapters a layer may have: what sorts pairs by adapter and expert counts all of these in registers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from moe_core import Environment
from moe_core.kernels.experts.grouped import MOST_LORA_GROUPS, GroupedExperts
from moe_core_meta_layers import H200, experts_cases, keys_on_h200, layer_of

ADAPTED = [experts for experts, lora in experts_cases(max_loras=2) if experts.claims.lora and not lora]


@pytest.mark.parametrize("experts", ADAPTED, ids=lambda experts: experts.__name__)
def test_more_adapters_and_experts_than_the_sort_counts_are_refused(experts: type[GroupedExperts]) -> None:
    config = layer_of(experts, is_lora_enabled=True)
    most = MOST_LORA_GROUPS // config.local_experts
    keys = keys_on_h200(experts, replace(config, max_loras=most))
    assert keys
    many = replace(config, max_loras=most + 1)
    reasons = experts.unsupported_reasons(many, *keys[0], H200, Environment.current())
    found = f"{many.max_loras * many.local_experts}: max_loras {many.max_loras} x {many.local_experts}"
    assert reasons == [f"applies LoRA to at most 8192 pairs of an adapter and a local expert, got {found}"]
