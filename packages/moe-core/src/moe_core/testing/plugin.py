"""pytest plugin: runs the conformance kit on experts named on the command line.

    pytest --moe-experts my_package:MyExperts

This runs every case of the class; without paths, pytest runs nothing else. The options are declared in
``moe_core.testing.pytest_options``, which pytest finds by entry point. That module loads this one if the options are
used.
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
    """Add the cases before any other plugin deselects items."""
    for spec in config.getoption("--moe-experts"):
        items.extend(ExpertsCollector.from_parent(session, name=spec).collect())


class ExpertsCollector(pytest.Collector):
    """Collector of the cases of one class."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield one item per case.

        Raises:
            pytest.UsageError: The class cannot be tested here.
        """
        from moe_core.errors import MoEError
        from moe_core.plugins.faults import Raised, attempt
        from moe_core.testing.conformance import cases_for
        from moe_core.testing.loading import load_plugin

        device, budget = self.config.getoption("--moe-device") or "auto", self.config.getoption("--moe-budget")
        try:
            experts = load_plugin(self.name)
            # The claims of the class may run its own code, which may raise.
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
    """The line that raised, since the message alone may not identify it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


class CaseItem(pytest.Item):
    """One case as a test item."""

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
        """Format a failed check as its message and a crash as the full traceback.

        Args:
            excinfo: The exception.
            style: Style of the traceback.

        Returns:
            The text or representation.
        """
        if isinstance(excinfo.value, AssertionError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, None, str]:
        """Report the test without a source line, since no source file defines it."""
        return self.path, None, self.nodeid
