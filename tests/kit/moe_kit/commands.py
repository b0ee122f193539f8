"""Run commands of ``moe`` in this process and check their output and exit code."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_core.cli.main import main

from moe_kit.ensure import ensure

if TYPE_CHECKING:
    import pytest

__all__ = ["Moe", "Result"]


@dataclass(frozen=True)
class Result:
    """Outcome of a command.

    Attributes:
        code: Exit code.
        out: Content of stdout.
        err: Content of stderr.
    """

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """The JSON that it printed."""
        return json.loads(self.out)


class Moe:
    """Callable that runs a command: ``moe(*arguments)``."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self.capture = capture

    def __call__(self, *arguments: object) -> Result:
        self.capture.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse exits
            code = int(end.code or 0)
        result = Result(code, *self.capture.readouterr())
        ensure("Traceback" not in result.err, result.err)
        return result

    def refuses(self, *arguments: object, parts: tuple[str, ...] = (), match: str = "") -> None:
        """Check that a command exits with code 2 and prints one paragraph to stderr only.

        Args:
            *arguments: The command and its arguments.
            parts: Texts that stderr must contain.
            match: Regular expression that stderr must contain.

        Raises:
            AssertionError: The command behaves otherwise.
        """
        result = self(*arguments)
        ensure((result.code, result.out) == (2, ""), f"ends with {result.code}: {result.out}{result.err}")
        ensure(result.err.startswith(f"moe {arguments[0]}: ") and "\n\n" not in result.err, result.err)
        missing = [part for part in parts if part not in result.err]
        ensure(not missing, f"{missing} not in: {result.err}")
        ensure(re.search(match, result.err) is not None, f"{match!r} not found in: {result.err}")
