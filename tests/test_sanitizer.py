"""The launches that compute-sanitizer is run over, without a GPU, and what is made of its logs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "sanitizer"
GROUPS = ("hopper", "words", "tiles", "ops", "gemv")
PLANTED = ("memcheck-planted", "memcheck-bounds", "racecheck-race", "synccheck-sync")
NONE = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
WRITE = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at reduce_kernel+0x1a0
=========     by thread (100,0,0) in block (0,0,0)
=========     Access at 0x7f5e2de00190 is out of bounds
========= ERROR SUMMARY: 1 error
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(FOLDER.parent / "kit"), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(FOLDER / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables)


def test_layers_launch_what_they_are_there_for():
    groups = [group for group in GROUPS if group != "ops"]
    done = run("launches.py", ",".join(groups), "-", "--dry")
    assert done.returncode == 0, done.stdout + done.stderr
    for group in groups:
        assert f"DONE {group}" in done.stdout


@pytest.fixture
def logs(tmp_path):
    for tool in ("memcheck", "racecheck", "synccheck"):
        for group in GROUPS:
            (tmp_path / f"{tool}-{group}.log").write_text(NONE)
            (tmp_path / f"{tool}-{group}.out").write_text(f"DONE {group}: 0 of others differ []\n")
    for name in PLANTED:
        (tmp_path / f"{name}.log").write_text(WRITE)
    return tmp_path


def summary(logs):
    done = run("summary.py", str(logs), str(logs / "report.txt"))
    assert not done.stderr
    return done.returncode, done.stdout


def test_no_errors_beside_planted_ones_that_were_found(logs):
    assert summary(logs)[0] == 0


def test_an_error_is_told_with_its_kernel(logs):
    (logs / "memcheck-ops.log").write_text(WRITE)
    code, said = summary(logs)
    assert code == 1
    assert "memcheck-ops: 1 errors" in said
    assert "reduce_kernel" in said


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_that_was_not_found(logs, name):
    (logs / f"{name}.log").write_text(NONE)
    code, said = summary(logs)
    assert code == 1
    assert f"{name}: the planted error was not found" in said


def test_what_was_cut_off_or_gave_other_bits(logs):
    (logs / "racecheck-tiles.log").write_text("========= COMPUTE-SANITIZER\n")
    (logs / "memcheck-gemv.out").write_text("DONE gemv: 1 of others differ ['int4']\n")
    code, said = summary(logs)
    assert code == 1
    assert "racecheck-tiles: cut off" in said
    assert "memcheck-gemv: DONE gemv: 1 of others differ" in said
