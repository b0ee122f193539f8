"""A command of ``moe`` as data."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command; its name is the entry point's.

    - ``summary``: what it shows, in some words, for the list of commands; ``description``: what else its help says
    - ``arguments``: adds them to the command's parser.  ``-v``/``--verbose`` and ``--json`` are every command's
    - ``run``: "module:function", imported when the command runs; takes the arguments, returns the exit code
    - ``check``: refuses arguments (:class:`moe_core.cli.checks.RefusedError`) before anything slow is imported
    """

    summary: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: str
    description: str = ""
    check: Callable[[argparse.Namespace], None] | None = None
