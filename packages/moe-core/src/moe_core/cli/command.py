"""A command of ``moe`` as data."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command; its name is the name of the entry point.

    Attributes:
        summary: A few words on what it shows, for the list of commands.
        arguments: Adds its arguments to its parser. Every command has ``-v``/``--verbose`` and ``--json``.
        run: "module:function", imported when the command runs. It takes the parsed arguments and returns the exit code.
        description: Further help text.
        check: Refuses arguments (:class:`moe_core.ConfigError`) before anything slow is imported.
    """

    summary: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: str
    description: str = ""
    check: Callable[[argparse.Namespace], None] | None = None
