"""For every test of the workspace: Triton kernels run on its interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

# read when Triton is imported, which no test module has done yet
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped where there is none; the sessions without a GPU do not select them."""
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a GPU; run with: nox -s 'gpu(sm90)'")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
