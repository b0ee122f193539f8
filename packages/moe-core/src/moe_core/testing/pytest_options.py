"""The pytest options of the kits: ``pytest --moe-experts my_package:MyExperts``, ``pytest --moe-fuzz 100000``.

pytest loads this with every run in an environment that holds moe-core.  It is apart from ``moe_core`` because importing
that imports torch, which takes seconds: the kit itself is loaded when an option asks for it.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("moe", "conformance of fused MoE experts")
    group.addoption(
        "--moe-experts",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="experts class to run the conformance kit on; may be repeated",
    )
    group.addoption("--moe-device", choices=("auto", "cpu", "cuda"), default=None, help="device of the kit")
    group.addoption(
        "--moe-budget",
        metavar="BUDGET",
        default=None,
        help="small: every claimed value; full: every pair of values; random:COUNT[:SEED]: so many random layers",
    )
    group.addoption(
        "--moe-fuzz",
        type=int,
        default=50,
        metavar="N",
        help="mutations of each sample that a test with the fixture moe_fuzz makes",
    )
    group.addoption("--moe-fuzz-start", type=int, default=0, metavar="SEED", help="the first one's seed")


@pytest.fixture(scope="session")
def moe_fuzz(request: pytest.FixtureRequest) -> range:
    """The seeds to give to :class:`moe_core.testing.fuzz.Fuzzer`."""
    start = request.config.getoption("--moe-fuzz-start")
    return range(start, start + request.config.getoption("--moe-fuzz"))


def pytest_configure(config: pytest.Config) -> None:
    """With classes to test, load the kit; without paths there is nothing else to collect."""
    if not config.getoption("--moe-experts"):
        return
    config.pluginmanager.import_plugin("moe_core.testing.plugin")
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []
