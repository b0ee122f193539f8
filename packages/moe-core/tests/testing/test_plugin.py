"""The pytest options of the conformance kit, as another package's author uses them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """pytest in a project of its own, away from this workspace's settings."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_options_do_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(
        "import sys\n\n\ndef test_light():\n    assert not {'torch', 'moe_core'} & set(sys.modules)\n"
    )
    code, text = run(tmp_path)
    assert code == 0, text
    assert "1 passed" in text


@pytest.mark.parametrize(
    ("experts", "message"),
    [("nowhere_at_all:Experts", "nowhere_at_all"), ("moe_core:Claims", "moe_core:Claims")],
)
def test_what_is_no_experts_class_is_refused(tmp_path: Path, experts: str, message: str) -> None:
    code, text = run(tmp_path, "--moe-experts", experts)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert message in text
    assert "Traceback" not in text
