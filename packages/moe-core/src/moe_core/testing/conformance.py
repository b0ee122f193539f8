"""The conformance kit: tests every claim of an experts class.

    class TestMine(ConformanceTests):
        experts = MyExperts                     # or "my_package:MyExperts"

There are three ways to run it: the class above in a test file, ``pytest --moe-experts my_package:MyExperts`` without a
test file, or :func:`run_case` on each result of :func:`cases_for` from anywhere. The contract under test is documented
in :mod:`moe_core.interface.experts`.

Strided cases vary the strides that a caller may vary: the row strides of hidden states, router weights and ids, and the
stride of an expert map. The kernel rejects hidden states with a non-unit column stride. It makes router weights, ids
and maps contiguous before it calls the experts, so experts only see row strides of the hidden states.
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
from moe_core.testing.random_cases import parse_budget, random_cases


def place_for(claims: Claims, device: str = "auto") -> Place | None:
    """Return the place where a class can be tested, or None if it claims no available device.

    GPU kernels run on the CPU when ``TRITON_INTERPRET=1`` is set.

    Args:
        claims: Claims of the experts class.
        device: "cpu", "cuda" (optionally with an index), or "auto" for the GPU if there is one.

    Returns:
        The place, or None if the claims exclude the device.

    Raises:
        ConfigError: ``device`` is not auto, cpu or cuda.
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
    """Return the test cases of a class on a device.

    Args:
        experts: Experts class, or its name as "module:Class".
        device: "cpu", "cuda", or "auto" for the GPU if there is one.
        budget: "small", "full", or "random:COUNT[:SEED]" for randomly drawn layers
            (:mod:`moe_core.testing.random_cases`).

    Returns:
        The cases; empty if the class does not run on the device.

    Raises:
        ConfigError: ``experts`` cannot be loaded, or the device or budget is unknown.
    """
    found = load_experts(experts)
    place = place_for(found.claims, device)
    drawn = parse_budget(budget)
    if place is None:
        return []
    if drawn is not None:
        return random_cases(found, *drawn, target=place.target, large=place.device.type == "cuda")
    return conformance_cases(found, target=place.target, budget=budget, on_gpu=place.device.type == "cuda")


def run_case(experts: type[FusedMoEExperts] | str, case: Case, *, device: str = "auto") -> None:
    """Run one case.

    Args:
        experts: Experts class, or its name as "module:Class".
        case: One of :func:`cases_for`.
        device: "cpu", "cuda", or "auto" for the GPU if there is one.

    Raises:
        AssertionError: The check failed. The message names the class, the case, its seed and the finding.
        ConfigError: The class does not run on the device.
    """
    found = load_experts(experts)
    place = place_for(found.claims, device)
    if place is None:
        raise ConfigError(f"{found.__name__} does not run on {device}: {' or '.join(map(str, found.claims.devices))}")
    try:
        with warnings.catch_warnings():
            # NumPy warns about operations that are well-defined on a GPU, such as an overflow to inf.
            if place.interpreted:
                warnings.simplefilter("ignore", RuntimeWarning)
                quicken()
            CHECKS[case.check](found, case, place)
    except AssertionError as error:
        raise AssertionError(f"{found.__name__}, case {case.id}, seed {case.seed}: {error}") from error


def _never_left_out(case: Case) -> bool:
    """Whether the interpreter runs the case regardless of ``interpreted_every``."""
    if case.check == "range":
        # Its small gates are the first to lose precision where a difference cancels.
        return case.config.activation is MoEActivation.SITU
    # These two checks have a single case each for many-row tiles and for large layers.
    return case.check in ("many_rows", "large")


class ConformanceTests:
    """Base of a test class: set ``experts``; pytest generates one test per case.

    The command-line options ``--moe-device`` and ``--moe-budget`` take precedence over the class attributes.

    Attributes:
        experts: Experts class, or its name as "module:Class".
        device: "auto", "cpu" or "cuda".
        budget: As for :func:`cases_for`.
        interpreted_every: Triton's interpreter, which takes seconds per case, runs every n-th case of the small budget.
            Cases of many rows, of large layers, and of SITU among tokens of all magnitudes always run. A GPU runs all
            cases.
    """

    experts: ClassVar[type[FusedMoEExperts] | str]
    device: ClassVar[str] = "auto"
    budget: ClassVar[str] = "small"
    interpreted_every: ClassVar[int] = 1

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize tests by case (pytest hook)."""
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
        """Run one case."""
        run_case(self.experts, conformance_case, device=getattr(self, "conformance_device", self.device))
