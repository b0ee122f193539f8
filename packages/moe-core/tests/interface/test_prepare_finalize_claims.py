"""What prepare/finalize classes claim, and the pairs with experts that this refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_core import DeviceInfo, Environment, FusedMoEConfig, FusedMoEParallelConfig
from moe_core._support.async_result import AsyncResult
from moe_core.interface.prepare_finalize_claims import PrepareFinalizeClaims
from moe_core.parallel.prepare_finalize.batched import BatchedPrepareAndFinalize
from moe_core.parallel.prepare_finalize.no_parallel import PrepareAndFinalizeNoParallel
from moe_core.spec.config import TokenSharing
from moe_core.spec.device import DeviceRange
from moe_core.spec.environment import Requirement
from moe_core_toys import MonolithicToyExperts, ToyExperts

CPU = DeviceInfo.parse("cpu")
CONFIG = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=96, intermediate_size=32)


class Narrow(PrepareAndFinalizeNoParallel):
    """Limits of every kind."""

    name = "narrow"
    collective = True
    lora = False
    claims = PrepareFinalizeClaims(
        frozenset({TokenSharing.NONE}),
        devices=(DeviceRange("cuda", 90),),
        dtypes=frozenset({torch.float16}),
        bounded=True,
        tensor_parallel=False,
        hidden_multiple=64,
        max_top_k=1,
        max_ranks=2,
        requires=(Requirement("no_such_module", "no-such-module"),),
    )


class Choosy(ToyExperts):
    claims = replace(ToyExperts.claims, all2all=frozenset({"alltoall"}))


def test_every_reason_is_given() -> None:
    config = replace(
        CONFIG,
        parallel=FusedMoEParallelConfig(tp_size=2, ep_size=2),
        is_lora_enabled=True,
        batch_invariant=True,
        activation_format="batched",  # type: ignore[arg-type]
    )
    reasons = Narrow.unsupported_reasons(config, Choosy, CPU, Environment())
    for reason, expected in zip(
        reasons,
        (
            "needs sm90 or newer, device is cpu",
            "needs no-such-module, which is not installed",
            "does not work with the same tokens on all ranks (dp_size 1)",
            "does not take hidden states in bfloat16, takes float16",
            "does not work with tensor parallelism (tp_size 2)",
            "is not batch invariant: the order in which it adds partial sums depends on other tokens",
            "needs max_num_tokens",
            "needs hidden_size to be a multiple of 64, got 96",
            "needs top_k <= 1, got 2",
            "needs at most 2 ranks, got 4",
            "returns the standard activation format, but the experts take batched",
            "does not transfer adapter_ids (LoRA)",
            "Choosy does not work behind narrow",
        ),
        strict=True,
    ):
        assert reason.startswith(expected)
    odd = replace(CONFIG, parallel=FusedMoEParallelConfig(dp_size=3, ep_size=4))
    assert "dp_size is 3, expected 1 or 4" in " ".join(Narrow.unsupported_reasons(odd, None, CPU))


@pytest.mark.parametrize("kind", [PrepareAndFinalizeNoParallel, BatchedPrepareAndFinalize])
def test_prepare_finalize_within_a_rank(kind: Any) -> None:
    config = replace(CONFIG, activation_format=kind.activation_format)
    assert kind.unsupported_reasons(config, ToyExperts, CPU) == []
    own = replace(config, parallel=FusedMoEParallelConfig(dp_size=2, ep_size=2))
    assert kind.unsupported_reasons(own, None, CPU) == [
        "does not work with tokens of each rank's own (dp_size = tp_size * ep_size)"
    ]
    assert kind.unsupported_reasons(config, MonolithicToyExperts, CPU) == [
        "MonolithicToyExperts is monolithic: it routes itself, after tokens have been dispatched"
    ]


def test_a_pending_result_is_finished_once() -> None:
    calls: list[int] = []

    def finish() -> int:
        calls.append(len(calls))
        if len(calls) == 1:
            raise ValueError("not yet")
        return 5

    pending = AsyncResult(finish)
    assert not calls
    with pytest.raises(ValueError, match="not yet"):
        pending.wait()
    assert (pending.wait(), pending(), len(calls)) == (5, 5, 2)
    assert AsyncResult.done(None).wait() is None
