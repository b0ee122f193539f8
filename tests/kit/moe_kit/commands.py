"""Commands of ``moe`` run in this process: what they print, how they end, what they refuse."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_core.cli.main import main
from moe_core.testing.ensure import ensure

if TYPE_CHECKING:
    import pytest

__all__ = ["Moe", "Result"]


@dataclass(frozen=True)
class Result:
    """How a command ended: the exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """What it printed as JSON."""
        return json.loads(self.out)


class Moe:
    """``moe(*arguments)`` runs a command."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self.capture = capture

    def __call__(self, *arguments: object) -> Result:
        self.capture.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
        result = Result(code, *self.capture.readouterr())
        ensure("Traceback" not in result.err, result.err)
        return result

    def refuses(self, *arguments: object, parts: tuple[str, ...] = (), match: str = "") -> None:
        """Exit code 2, nothing on stdout, one paragraph on stderr: with all ``parts``, and the pattern ``match``."""
        result = self(*arguments)
        ensure((result.code, result.out) == (2, ""), f"ends with {result.code}: {result.out}{result.err}")
        ensure(result.err.startswith(f"moe {arguments[0]}: ") and "\n\n" not in result.err, result.err)
        missing = [part for part in parts if part not in result.err]
        ensure(not missing, f"{missing} not in: {result.err}")
        ensure(re.search(match, result.err) is not None, f"{match!r} not found in: {result.err}")
