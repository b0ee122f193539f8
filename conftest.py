"""Pytest configuration of the workspace.

Kernels run on the GPU if there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
import torch
from moe_core.testing.interpreter import quicken

# provides fixtures for tests that run pytest
pytest_plugins = ["pytester"]

HAS_GPU = torch.cuda.is_available()

# Triton reads the variable when it is imported, which no test module has done yet.
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
quicken()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers of this file (pytest hook)."""
    config.addinivalue_line(
        "markers",
        "diagonal(n): where kernels are interpreted, of the combinations of several parameters only those whose "
        "positions add up to a multiple of n; every value of each parameter still occurs",
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options (pytest hook).

    ``--every N`` thins out parametrized tests. ``--layers N`` and ``--moe-fuzz N`` draw more random cases.
    """
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="of each parametrized test, run the first case and every Nth after it",
    )
    parser.addoption(
        "--layers",
        type=int,
        default=4,
        metavar="N",
        help="random layers in each class of experts that runs without a GPU",
    )
    parser.addoption("--moe-fuzz", type=int, default=50, metavar="N", help="mutations of each sample in a fuzz test")
    parser.addoption("--moe-fuzz-start", type=int, default=0, metavar="SEED", help="the first mutation's seed")


@pytest.fixture(scope="session")
def moe_fuzz(request: pytest.FixtureRequest) -> range:
    """Seeds of the mutations in a fuzz test."""
    start = request.config.getoption("--moe-fuzz-start")
    return range(start, start + request.config.getoption("--moe-fuzz"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect and skip tests (pytest hook).

    Interpreted runs keep only the diagonal of marked tests. ``--every`` keeps the first case and every Nth after it.
    Tests marked ``gpu`` are skipped without a GPU; sessions without a GPU do not select them.
    """
    every, diagonal = config.getoption("--every"), Diagonal()
    seen: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        if not HAS_GPU and not diagonal.holds(item):
            left_out.append(item)
            continue
        test = item.nodeid.partition("[")[0]
        (left_out if seen[test] % every else kept).append(item)
        seen[test] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a GPU; run with: nox -s 'gpu(sm90)'")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


class Diagonal:
    """Select the cases that the marker ``diagonal`` keeps."""

    def __init__(self) -> None:
        self.values: defaultdict[tuple[str, str], list[object]] = defaultdict(list)

    def holds(self, item: pytest.Item) -> bool:
        """Whether the positions of a case's parameter values add up to a multiple of n.

        Args:
            item: The test.

        Returns:
            True to keep it; also for tests without the marker.
        """
        marker, case = item.get_closest_marker("diagonal"), getattr(item, "callspec", None)
        if marker is None or case is None:
            return True
        total = 0
        for name, value in case.params.items():
            seen = self.values[item.nodeid.partition("[")[0], name]
            if not any(value is other for other in seen):
                seen.append(value)
            total += next(i for i, other in enumerate(seen) if value is other)
        return bool(total % marker.args[0] == 0)


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> Iterator[None]:
    """Restore default signal handlers that are ignored.

    A shell ignores these signals in background processes and all their children.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [number for number in usual if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, usual[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Device that kernels run on: the GPU, or the CPU in the interpreter."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without a GPU: commands and layers choose the CPU automatically."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
