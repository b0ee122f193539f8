"""Shared by the tests of moe-core."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _installed_from_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice names packages as an index does, wherever the tests run from."""
    monkeypatch.setattr("moe_core.plugins.install._origin", dict)
