"""The conformance kit: every claim of an experts class, tested.

    class TestMine(ConformanceTests):
        experts = MyExperts                     # or "my_package:MyExperts"

in a test file, ``pytest --moe-experts my_package:MyExperts`` without one, or :func:`run_case` for each of
:func:`cases_for` from anywhere.  The contract that is checked stands in :mod:`moe_core.interface.experts`.

Strided cases vary what a caller may vary: the row strides of hidden states, router weights and ids, and the stride of
an expert map.  The kernel refuses hidden states whose columns lie apart, and hands contiguous router weights, ids and
maps to the experts, so that the experts meet row strides of the hidden states only.
"""

from __future__ import annotations

import os
import warnings
from typing import Any, ClassVar

import torch

from moe_core.errors import ConfigError
from moe_core.interface.claims import Claims
from moe_core.interface.experts import FusedMoEExperts
from moe_core.spec.activation import MoEActivation
from moe_core.spec.device import DeviceInfo
from moe_core.testing.cases import Case, conformance_cases
from moe_core.testing.checks import CHECKS
from moe_core.testing.harness import PRETENDED, Place
from moe_core.testing.interpreter import quicken
from moe_core.testing.loading import load_experts, load_plugin
from moe_core.testing.random_cases import RandomBudget, random_cases


def place_for(claims: Claims, device: str = "auto") -> Place | None:
    """Where a class can be tested: ``device`` "cpu", "cuda", or "auto" for the GPU if there is one.

    Kernels for GPUs run on the CPU where ``TRITON_INTERPRET=1`` is set.  None where the claims leave the device out.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"the device is auto, cpu or cuda, got {device!r}")
    tensors = torch.device(device)
    targets = [DeviceInfo.current(tensors)]
    if tensors.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        targets += map(DeviceInfo.parse, PRETENDED)
    for target in targets:
        if any(r.reason_against(target) is None for r in claims.devices):
            return Place(tensors, target)
    return None


def cases_for(experts: type[FusedMoEExperts] | str, *, device: str = "auto", budget: str = "small") -> list[Case]:
    """The cases of a class on a device; empty where the class does not run there.

    ``budget``: "small", "full", or "random:COUNT" and "random:COUNT:SEED" for layers drawn at random instead
    (:mod:`moe_core.testing.random_cases`).
    """
    found = load_experts(experts)
    place = place_for(found.claims, device)
    drawn = RandomBudget.parse(budget)
    if place is None:
        return []
    if drawn is not None:
        return random_cases(found, drawn, target=place.target, large=place.device.type == "cuda")
    return conformance_cases(found, target=place.target, budget=budget, on_gpu=place.device.type == "cuda")


def run_case(experts: type[FusedMoEExperts] | str, case: Case, *, device: str = "auto") -> None:
    """Run one case.  Raises AssertionError that names the class, the case, its seed and what was found."""
    found = load_experts(experts)
    place = place_for(found.claims, device)
    if place is None:
        raise ConfigError(f"{found.__name__} does not run on {device}: {' or '.join(map(str, found.claims.devices))}")
    try:
        with warnings.catch_warnings():
            if place.interpreted:  # NumPy warns of what is well-defined on a GPU: an overflow to inf
                warnings.simplefilter("ignore", RuntimeWarning)
                quicken()
            CHECKS[case.check](found, case, place)
    except AssertionError as error:
        raise AssertionError(f"{found.__name__}, case {case.id}, seed {case.seed}: {error}") from error


def _never_left_out(case: Case) -> bool:
    """Whether the interpreter runs a case in any class."""
    if case.check == "range":
        # its small gates are the first to be lost where a difference cancels
        return case.config.activation is MoEActivation.SITU
    # of the tiles for many rows, and of large layers, there is one case alone
    return case.check in ("many_rows", "large")


class ConformanceTests:
    """Base of a test class: set ``experts``; pytest makes one test of each case.

    ``device`` "auto", "cpu" or "cuda"; ``budget`` as of :func:`cases_for`.  The command line's ``--moe-device`` and
    ``--moe-budget`` come before what the class says.  ``interpreted_every``: Triton's interpreter, which takes seconds
    for a case, runs every so many of the small budget's, and those of many rows, of large layers, and of SITU among
    tokens of all magnitudes; a GPU runs all.
    """

    experts: ClassVar[type[FusedMoEExperts] | str]
    device: ClassVar[str] = "auto"
    budget: ClassVar[str] = "small"
    interpreted_every: ClassVar[int] = 1

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """pytest's hook: one test per case."""
        if "conformance_case" not in metafunc.fixturenames:
            return
        device = metafunc.config.getoption("--moe-device", default=None) or self.device
        budget = metafunc.config.getoption("--moe-budget", default=None) or self.budget
        experts = load_plugin(self.experts, doubles=True)
        cases = cases_for(experts, device=device, budget=budget)
        place = place_for(experts.claims, device)
        if budget == "small" and place is not None and place.interpreted:
            kept = enumerate(cases)
            cases = [case for i, case in kept if i % self.interpreted_every == 0 or _never_left_out(case)]
        metafunc.parametrize("conformance_case", cases, ids=[case.id for case in cases])
        metafunc.cls.conformance_device = device

    def test_conformance(self, conformance_case: Case) -> None:
        """One case."""
        run_case(self.experts, conformance_case, device=getattr(self, "conformance_device", self.device))
