"""Where only tokens come that have an expert here, kernels are chosen for the rows that the experts then have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moe_core import FusedMoEConfig, FusedMoEKernel, FusedMoEParallelConfig
from moe_core.interface.prepare_finalize import TokenRouting
from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.kernels.launch.launch import record
from moe_core.parallel.prepare_finalize.all_gather import AllGatherPrepareAndFinalize
from moe_core.parallel.prepare_finalize.all_to_all import AllToAllPrepareAndFinalize
from moe_core.parallel.prepare_finalize.collective import CollectivePrepareAndFinalize
from moe_core.parallel.prepare_finalize.deepep import DeepEPPrepareAndFinalize
from moe_core.parallel.prepare_finalize.no_parallel import PrepareAndFinalizeNoParallel
from moe_core.parallel.prepare_finalize.pushed import PushedTokens
from moe_core.runtime.call_launches import call_launches, launches_up_to
from moe_core.spec.workspace import Workspace
from moe_core.testing.meta_layers import meta_layer_weights
from moe_core_meta_layers import H200, experts_cases, grouped_experts, keys_on_h200, layer_of, on_h200

EP, E, TOP_K = 4, 16, 2
CLASSES = (AllToAllPrepareAndFinalize, DeepEPPrepareAndFinalize)


def movement(cls: type[CollectivePrepareAndFinalize], **sizes: Any) -> CollectivePrepareAndFinalize:
    """Of one of four ranks, which exchange nothing."""
    parallel = FusedMoEParallelConfig.of_rank(1, ep_size=EP, dp_size=EP)
    groups: Any = SimpleNamespace(parallel=parallel, tokens="exchanged", among=lambda _: SimpleNamespace())
    sizes = {"num_experts": E, "top_k": TOP_K, "hidden_size": 256, "intermediate_size": 128} | sizes
    return cls(FusedMoEConfig(**sizes, dtype=torch.bfloat16, parallel=parallel, max_num_tokens=64), groups)


def arrived(cls: type[CollectivePrepareAndFinalize], tokens: int) -> float | None:
    """Rows of each expert, as prepare tells them, of ``tokens`` that came."""
    x = torch.empty(tokens, 256, dtype=torch.bfloat16, device="meta")
    weights = torch.empty(tokens, TOP_K, device="meta")
    ids = torch.empty(tokens, TOP_K, dtype=torch.int32, device="meta")
    prepared = movement(cls).prepare(x, TokenRouting(weights, ids))
    return None if prepared.expert_tokens is None else prepared.expert_tokens.mean


@pytest.mark.parametrize("cls", CLASSES)
def test_rows_are_those_of_uniform_routing(cls: type[CollectivePrepareAndFinalize]) -> None:
    ids = torch.rand(200_000, E, generator=torch.Generator().manual_seed(0)).topk(TOP_K).indices
    own = ids // (E // EP) == 1
    came = int(own.any(1).sum())
    rows = arrived(cls, came)
    assert rows == pytest.approx(float(own.sum()) / (E // EP), rel=0.01)
    # twice as many as tokens and top-k say
    assert rows is not None
    assert rows > 2 * came * TOP_K / E


def test_where_all_tokens_come_nothing_is_told() -> None:
    assert arrived(AllGatherPrepareAndFinalize, 40) is None


def test_rows_that_no_token_is_in_stand_for_the_others() -> None:
    pushed = PushedTokens(*[None] * 5)  # type: ignore[arg-type]
    layer = movement(AllToAllPrepareAndFinalize)
    assert layer.chosen_from(40, pushed) == 40
    assert layer.chosen_from(40) > 40
    layer._room = object()  # type: ignore[assignment]
    assert layer.chosen_from(40) == 40


def test_warming_up_before_gpus_share_memory_covers_both_ways() -> None:
    """Rows that are sent are chosen ones; those that GPUs write into each other's memory are not."""
    layer = movement(AllToAllPrepareAndFinalize, top_k=1, hidden_size=5120, intermediate_size=8192)
    cls = next(one for one in grouped_experts() if one.__name__ == "MarlinMxfp4Experts")
    weight_key, activation_key = keys_on_h200(cls, layer.config)[0]
    experts = cls(layer.config, weight_key=weight_key, activation_key=activation_key, device=H200)
    kernel = FusedMoEKernel(experts, meta_layer_weights(experts), layer)
    warm = {one.compiled_for() for one in launches_up_to(kernel, 16)}
    layer._connected = True
    for supposed in (False, True):
        layer._supposed = supposed
        for tokens in range(EP, 16 * EP + 1, EP):
            assert {one.compiled_for() for one in call_launches(kernel, tokens)} <= warm


def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens for which plans are looked up from now on."""
    numbers: list[int] = []
    plan = GroupedExperts.plan

    def listed(self: GroupedExperts, num_tokens: int, on_gpu: bool = True) -> Any:
        numbers.append(num_tokens)
        return plan(self, num_tokens, on_gpu)

    monkeypatch.setattr(GroupedExperts, "plan", listed)
    return numbers


# few experts of the tokens that came may be here: scratch memory is for as many as came all the same
@pytest.mark.parametrize(("counts", "tokens"), [(None, 40), ([40], 40), ([90, 0, 70], 160), ([10], 40), ([0], 40)])
def test_a_caller_says_from_how_many_it_chose(
    counts: list[int] | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = experts_cases()[0][0]
    kernel = on_h200(experts, layer_of(experts))
    numbers, config = asked(monkeypatch), kernel.config
    x = torch.empty(40, config.hidden_size, dtype=config.dtype, device="meta")
    weights = torch.empty(40, config.top_k, device="meta")
    ids = torch.empty(40, config.top_k, dtype=torch.int32, device="meta")
    with record():
        routing = TokenRouting(weights, ids, tokens_per_rank=counts)
        kernel.run_parts(Workspace("meta"), torch.empty_like(x), x, routing)
    assert set(numbers) == {tokens}


class EverySecond(PrepareAndFinalizeNoParallel):
    """Stands for prepare/finalize by which every second token comes."""

    collective = True

    def chosen_from(self, rows: int, handle: object = None) -> int:
        return 2 * rows


def test_warming_up_asks_for_the_kernels_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experts_cases()[0][0]
    alone = on_h200(experts, layer_of(experts))
    kernel = FusedMoEKernel(alone.experts, alone.weights, EverySecond(alone.config))
    numbers: list[int] = []
    monkeypatch.setattr(GroupedExperts, "launch_variant", lambda _, tokens: numbers.append(tokens))
    launches_up_to(kernel, 300)
    assert numbers == [2 * tokens for tokens in range(1, 301)]
