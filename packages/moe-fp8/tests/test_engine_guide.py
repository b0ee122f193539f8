"""The engine guide on a GPU, where its graphs are captured; CI runs it on a CPU with the other documents."""

from __future__ import annotations

from pathlib import Path

import pytest
import run_examples

GUIDE = Path(__file__).parents[3] / "docs" / "engines.md"


@pytest.mark.gpu
def test_the_guide_runs_on_a_gpu() -> None:
    assert run_examples.run(GUIDE) >= 12
