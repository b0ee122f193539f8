"""moe bench: time per token count and backend, beside the machine's limits."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this command."""


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit code."""
    return 0
