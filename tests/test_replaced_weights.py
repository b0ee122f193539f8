"""A kernel that is given other weights lets go of the old ones: records, prepared layers and caches keep nothing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from moe_core import FusedMoEKernel, registry
from moe_core.interface.experts import FusedMoEExperts
from moe_core.interface.recordable import RecordableExperts
from moe_core.spec.environment import Environment
from moe_core.spec.workspace import Workspace
from moe_core.testing.conformance import cases_for, place_for
from moe_core.testing.harness import Problem, call, make_kernel, make_problem
from moe_core_replays import as_if_compiled


def running_here() -> list[Any]:
    """Every class that runs on a CPU, in Triton's interpreter where it has kernels."""
    environment, found = Environment.current(), {}
    for scheme in registry().scheme_names():
        for backend in registry().oracle(scheme).table():
            for experts in backend.load():
                reasons = [environment.reason_against(requirement) for requirement in experts.claims.requires]
                if not any(reasons) and place_for(experts.claims, "cpu") is not None:
                    found[f"{scheme}-{experts.__name__}"] = experts
    return [pytest.param(experts, id=name) for name, experts in found.items()]


def called(experts: type[FusedMoEExperts], monkeypatch: pytest.MonkeyPatch) -> tuple[FusedMoEKernel, Problem]:
    """A small layer with weights of its own that was called as often as makes it keep what later calls need."""
    place = place_for(experts.claims, "cpu")
    # Random layers are drawn faster than layers that cover the claims.
    cases = cases_for(experts, device="cpu", budget="random:20")
    case = next(
        (
            case
            for case in cases
            if case.tokens and not case.config.is_lora_enabled and not case.config.apply_router_weight_on_input
        ),
        None,
    )
    assert place is not None
    assert case is not None
    problem = make_problem(case, place.device)
    made = make_kernel(experts, problem, place)
    own = made.weights.apart_from(problem.weights)
    kernel = FusedMoEKernel(made.experts, own, made.prepare_finalize, workspace=Workspace("cpu"))
    if issubclass(experts, RecordableExperts):
        as_if_compiled(monkeypatch)
    for _ in range(3):
        call(kernel, problem)
    return kernel, problem


@pytest.mark.parametrize("experts", running_here())
def test_old_weights_are_free_at_once(experts: type[FusedMoEExperts], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, problem = called(experts, monkeypatch)
    movement = kernel.prepare_finalize
    recorded = issubclass(experts, RecordableExperts) and movement is not None and movement.recordable
    assert kernel._replay.reasons() == ((None,) if recorded else ())
    memory = {name: weakref.ref(tensor.untyped_storage()) for name, tensor in kernel.weights.tensors()}
    new = kernel.experts.convert(problem.weights)
    gc.collect()
    gc.disable()  # memory of a GPU does not make Python collect anything
    try:
        kernel.weights = new
        kept = [name for name, storage in memory.items() if storage() is not None]
    finally:
        gc.enable()
    assert memory
    assert not kept
    call(kernel, problem)
