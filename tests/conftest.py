"""Shared by the tests that cross packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The workspace."""
    return ROOT


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Runs Python code in a process of its own and returns what it printed."""

    def run(code: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
