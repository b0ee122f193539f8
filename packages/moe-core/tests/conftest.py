"""Kernels run on the GPU where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    # numpy, under the interpreter, reports what a GPU computes silently in lanes that are masked afterwards
    config.addinivalue_line("filterwarnings", "ignore:.* encountered in:RuntimeWarning")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _installed_from_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice names packages as an index does, wherever the tests run from."""
    monkeypatch.setattr("moe_core.install._origin", dict)
