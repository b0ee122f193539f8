"""For every test of the workspace: Triton kernels run on its interpreter where there is no GPU."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from moe_core.testing.interpreter import quicken

HAS_GPU = torch.cuda.is_available()

# read when Triton is imported, which no test module has done yet
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
quicken()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--every N`` thins out parametrised tests."""
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="of each parametrised test, run the first case and every Nth after it",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes every Nth case where that is asked for.

    Tests marked ``gpu`` are skipped where there is none; the sessions without a GPU do not select them.
    """
    every = config.getoption("--every")
    if every > 1:
        seen: Counter[str] = Counter()
        kept, left_out = [], []
        for item in items:
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
