"""What ranks of the tests of commands do: they run ``moe``."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import runpy
from collections.abc import Sequence

from moe_core_checkpoints import entry_points


def run_commands(rank: int, ranks: int, commands: Sequence[Sequence[str]]) -> list[tuple[int, str, str]]:
    """As :func:`run_installed`, in an installation that has the scheme ``plain`` alone."""
    importlib.metadata.entry_points = entry_points  # type: ignore[assignment]
    from moe_core.selection.registry import registry

    registry.cache_clear()
    return run_installed(rank, ranks, commands)


def run_installed(rank: int, ranks: int, commands: Sequence[Sequence[str]]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each command."""
    from moe_core.cli.main import main

    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    found = []
    for command in commands:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(command))
        found.append((code, out.getvalue(), err.getvalue()))
    return found


def run_example(rank: int, path: str) -> float:
    """What ``main`` of an example returns on this rank."""
    result: float = runpy.run_path(path)["main"]()
    return result
