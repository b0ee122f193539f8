"""pytest plugin: the conformance kit for experts named on the command line.

    pytest --moe-experts my_package:MyExperts

runs every case of the class; without paths of its own the command runs nothing else.  The options are declared by
``moe_core.testing.pytest_options``, which pytest finds by entry point and which loads this module where they are used.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from moe_core.testing.cases import Case


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the cases, before anything deselects."""
    for spec in config.getoption("--moe-experts"):
        items.extend(ExpertsCollector.from_parent(session, name=spec).collect())


class ExpertsCollector(pytest.Collector):
    """The cases of one class."""

    def collect(self) -> Iterator[pytest.Item]:
        """One item per case; a class that can't be tested here is one item that says so."""
        from moe_core.errors import MoEError
        from moe_core.plugins.faults import Raised, attempt
        from moe_core.testing.conformance import cases_for
        from moe_core.testing.loading import load_plugin

        device, budget = self.config.getoption("--moe-device") or "auto", self.config.getoption("--moe-budget")
        try:
            experts = load_plugin(self.name)
            # what the class answers is its own code
            cases = attempt(lambda: cases_for(experts, device=device, budget=budget or "small"))
        except MoEError as error:
            raise pytest.UsageError(str(error)) from error
        if isinstance(cases, Raised):
            raise pytest.UsageError(f"no cases of {self.name}: {cases}{_where(cases.error)}") from cases.error
        devices = " or ".join(map(str, experts.claims.devices))
        if not cases:
            raise pytest.UsageError(
                f"{self.name} does not run on this machine's {device} device: it claims {devices} "
                "(Triton kernels for GPUs run on the CPU with TRITON_INTERPRET=1)"
            )
        for case in cases:
            yield CaseItem.from_parent(self, name=case.id, case=case, device=device)


def _where(error: BaseException) -> str:
    """The line that raised, where the message alone leaves one searching."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


class CaseItem(pytest.Item):
    """One case as a test."""

    def __init__(self, *, case: Case, device: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.case = case
        self.device = device

    def runtest(self) -> None:
        """Run the case."""
        from moe_core.testing.conformance import run_case

        spec = self.parent.name if self.parent is not None else ""
        run_case(spec, self.case, device=self.device)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The message alone for a failed condition, the whole trace for a crash."""
        if isinstance(excinfo.value, AssertionError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, None, str]:
        """Where the test stands: nowhere but in the class's claims."""
        return self.path, None, self.nodeid
