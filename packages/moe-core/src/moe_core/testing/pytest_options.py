"""Pytest options of the conformance kit: ``pytest --moe-experts my_package:MyExperts``.

pytest loads this module in every run of an environment that has moe-core installed. It does not import torch. The kit
itself is loaded only if an option asks for it.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options (pytest hook)."""
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


def pytest_configure(config: pytest.Config) -> None:
    """Load the kit if classes are named (pytest hook); without paths, collect nothing else."""
    if not config.getoption("--moe-experts"):
        return
    config.pluginmanager.import_plugin("moe_core.testing.plugin")
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []
