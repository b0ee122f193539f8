"""Which prepare/finalize classes go with which backends, why others do not, and which one is taken."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from moe_core import (
    Backend,
    ConfigError,
    DeviceInfo,
    Environment,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    Oracle,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
)
from moe_core.cli._prepare_finalize import PrepareFinalizeSelection, select_prepare_finalize
from moe_core.parallel.distributed.cost import MACHINES
from moe_core_toys import PLAIN, TOY, MonolithicToyExperts, ToyExperts

KEYS: dict[str, Any] = {"weight_key": kFp8Static128BlockSym, "activation_key": kFp8Dynamic128Sym}
CLAIMS = replace(PLAIN, keys=((kFp8Static128BlockSym, kFp8Dynamic128Sym),))


class Routes(MonolithicToyExperts):
    """Routes by itself."""

    claims = CLAIMS


class Gathers(ToyExperts):
    """Works behind an all-gather only."""

    claims = replace(CLAIMS, all2all=frozenset({"allgather_reducescatter"}))


class Quantized(ToyExperts):
    """Takes tokens that are quantized already."""

    claims = replace(CLAIMS, takes_quantized=True)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    rows = (Backend("routes", (Routes,)), Backend("gathers", (Gathers,)), Backend("quantized", (Quantized,)))
    return Oracle(replace(TOY, backends=rows, last_resort="quantized", order=None))


def select(oracle: Oracle, *, tp: int = 1, ep: int = 1, dp: int = 1, **more: Any) -> PrepareFinalizeSelection:
    parallel = FusedMoEParallelConfig(tp_size=tp, ep_size=ep, dp_size=dp)
    config = FusedMoEConfig(64, 4, 4096, 1024, parallel=parallel)
    given: dict[str, Any] = {"device": DeviceInfo.parse("h200"), "tokens": 64, "environment": Environment(), **KEYS}
    return select_prepare_finalize(oracle, config, **(given | more))


def candidate(found: PrepareFinalizeSelection, name: str) -> Any:
    return next(one for one in found.candidates if one.name == name)


def test_tokens_that_cross_ranks_have_no_monolithic_experts(oracle: Oracle) -> None:
    found = select(oracle, ep=8, dp=8)
    pairs = {c.backend: c.reasons for c in candidate(found, "alltoall").report.candidates}
    assert pairs["routes"] == (
        "behind alltoall: Routes is monolithic: it routes itself, after tokens have been dispatched",
    )
    assert "behind alltoall: Gathers does not work behind alltoall" in pairs["gathers"]
    assert pairs["quantized"] == ()
    assert candidate(found, "alltoall").report.chosen.backend == "quantized"
    assert candidate(found, "allgather_reducescatter").report.chosen.backend == "gathers"


def test_selection_itself_holds_experts_to_the_prepare_finalize_of_the_config(oracle: Oracle) -> None:
    config = FusedMoEConfig(
        64, 4, 4096, 1024, parallel=FusedMoEParallelConfig(ep_size=8, dp_size=8, all2all_backend="alltoall")
    )
    assert oracle.select(config, **KEYS, device="h200", environment=Environment()).backend == "quantized"
    # an engine's own prepare/finalize is the engine's matter
    own = replace(config, parallel=replace(config.parallel, all2all_backend="mine"))
    assert oracle.select(own, **KEYS, device="h200", environment=Environment()).backend == "routes"


def test_only_experts_that_take_it_get_quantized_tokens(oracle: Oracle) -> None:
    found = select(oracle, ep=8, dp=8)
    assert candidate(found, "alltoall").payload == kFp8Dynamic128Sym
    assert candidate(found, "allgather_reducescatter").payload is None
    there = {
        c.name: c.cost.dispatch_bytes for c in found.candidates if c.name in ("alltoall", "allgather_reducescatter")
    }
    # 4096 codes and 32 scales of 4 bytes, or 4096 values of 2, beside 8 bytes of each of 4 slots
    assert there["allgather_reducescatter"] == 7 * 64 * (8192 + 32)
    assert there["alltoall"] < 7 * 64 * (4096 + 128 + 32) + 8 * 8


def test_the_fastest_is_taken_or_the_one_asked_for(oracle: Oracle) -> None:
    few, many = (select(oracle, ep=64, dp=64, tokens=tokens, machine=MACHINES["gb200"]) for tokens in (1, 8192))
    for found in (few, many):
        assert found.chosen is not None
        # of equal ones that which can be captured: all-to-all and low latency take the same steps within a domain
        times = {c.name: (c.cost.seconds if c.cost else 1.0, not c.cuda_graph) for c in found.candidates if c.fits}
        best = candidate(found, min(times, key=times.__getitem__))
        assert found.chosen is best
        assert [name for tokens, name in found.fastest if tokens <= found.tokens][-1] == best.name
    asked = select(oracle, ep=8, dp=8, all2all="alltoall")
    assert asked.chosen is not None
    assert asked.chosen.name == "alltoall"
    refused = select(oracle, ep=8, dp=8, all2all="alltoall", moe_backend="gathers")
    assert refused.chosen is None
    assert candidate(refused, "allgather_reducescatter").fits


def test_captures_need_prepare_finalize_and_experts_that_can_be(oracle: Oracle) -> None:
    found = select(oracle, ep=8, dp=8)
    assert candidate(found, "allgather_reducescatter").cuda_graph
    assert not candidate(found, "alltoall").cuda_graph


def test_ranks_with_the_same_tokens_add_up(oracle: Oracle) -> None:
    found = select(oracle, tp=2, ep=2)
    assert [c.name for c in found.candidates] == ["all_reduce", "reduce_scatter"]
    assert found.chosen is not None
    assert found.chosen.name == "all_reduce"
    assert found.fastest == ()


def test_what_no_prepare_finalize_can_do_is_said_once(oracle: Oracle) -> None:
    with pytest.raises(ConfigError, match="dp_size .*3"):
        select(oracle, ep=8, dp=3)
    with pytest.raises(ConfigError, match="all2all_backend"):
        select(oracle, ep=8, dp=8, all2all="alltoal")
    with pytest.raises(ConfigError, match="'alltoall'"):
        select(oracle, ep=8, all2all="alltoall")


def test_memory_of_other_gpus_is_reached_within_a_domain(oracle: Oracle) -> None:
    environment = {"environment": Environment.current()}
    assert candidate(select(oracle, ep=8, dp=8, **environment), "low_latency").fits
    far = candidate(select(oracle, ep=16, dp=16, **environment), "low_latency")
    assert far.reasons == ("writes into the memory of other GPUs: only 8 reach each other on h200, got 16 ranks",)
    assert not far.fits
    # a rack of 72
    assert candidate(select(oracle, ep=16, dp=16, machine=MACHINES["gb200"], **environment), "low_latency").fits


def test_the_report_is_json(oracle: Oracle) -> None:
    data = json.loads(json.dumps(select(oracle, tp=2, ep=8, dp=8).as_dict(), allow_nan=False))
    assert (data["tp_size"], data["ep_size"], data["dp_size"], data["tokens_per_rank"]) == (2, 8, 8, 64)
    assert {pair["backend"] for pair in data["prepare_finalize"][0]["pairs"]} == {"routes", "gathers", "quantized"}
    assert data["prepare_finalize"][0]["cost"]["seconds"] > 0
    payloads = {
        one["name"]: one["quantized_before"] for one in select(oracle, ep=8, dp=8).as_dict()["prepare_finalize"]
    }
    assert (payloads["alltoall"], payloads["allgather_reducescatter"]) == (str(kFp8Dynamic128Sym), None)
    elsewhere = select(oracle, ep=8, dp=8, device="cpu").as_dict()
    assert elsewhere["machine"] is None
    assert elsewhere["prepare_finalize"][0]["cost"]["seconds"] is None
