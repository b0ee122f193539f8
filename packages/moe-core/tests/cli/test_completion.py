"""Shell completion, as argcomplete asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("argcomplete", reason="the extra moe-core[completion] brings it")


def completed(line: str, tmp_path: Path) -> set[str]:
    """What may follow the ``line``, answered without an import of torch."""
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    code = "import sys\nsys.modules['torch'] = None\nfrom moe_core.cli.main import main\nmain(['doctor'])"
    subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    return {word.strip() for word in (tmp_path / "answer").read_text().split("\n") if word.strip()}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("moe b", {"backends", "bench"}),
        ("moe run --ch", {"--check"}),
        ("moe explain --dtype b", {"bf16", "bfloat16"}),
        ("moe explain --activation-format ", {"standard", "batched"}),
    ],
)
def test_completion(line: str, words: set[str], tmp_path: Path) -> None:
    assert completed(line, tmp_path) == words
