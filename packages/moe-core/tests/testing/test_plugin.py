"""``pytest --moe-experts``: the kit without a test file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXPERTS = """
from dataclasses import replace
import torch
from moe_core import GATED, Claims, MoEActivation, any_device, cuda
from moe_core.torch_experts import TorchExperts

class Mine(TorchExperts):
    protocol_version = 2
    claims = Claims(
        devices=(any_device(),), keys=((None, None),), activations=frozenset({MoEActivation.SILU}),
        dtypes=frozenset({torch.float32}), expert_map=False, activation_limit=False, cuda_graph=False,
    )

class Wrong(Mine):
    def apply(self, *arguments, topk_weights, **named):
        super().apply(*arguments, topk_weights=topk_weights.square(), **named)

class Elsewhere(Mine):
    claims = replace(Mine.claims, devices=(cuda(min=90),))

class Outdated(Mine):
    protocol_version = 99

class Raises(Mine):
    @classmethod
    def extra_reasons(cls, *arguments):
        raise KeyError("boo")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(EXPERTS)
    (tmp_path / "test_other.py").write_text("def test_other():\n    pass\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--moe-device", "cpu", *arguments]
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {"PYTHONPATH": path, "PATH": "", "TRITON_INTERPRET": "0"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_sound_experts_pass_and_nothing_else_runs(folder: Path) -> None:
    done = run(folder, "--moe-experts", "mine:Mine", "-k", "not compile and not opcheck")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed, 2 deselected" in done.stdout
    listed = run(folder, "--moe-experts", "mine:Mine", "--collect-only")
    assert "mine:Mine::values-16bit-16bit-silu-float32-" in listed.stdout
    assert "test_other" not in listed.stdout


def test_other_tests_run_where_they_are_named(folder: Path) -> None:
    done = run(folder, "test_other.py", "--moe-experts", "mine:Mine", "-k", "refusals or other")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_a_failure_says_which_case_and_how_far(folder: Path) -> None:
    done = run(folder, "--moe-experts", "mine:Wrong", "-k", "values", "-x")
    assert done.returncode == 1
    assert "Wrong, case values-" in done.stdout
    assert "the error's norm is" in done.stdout
    assert "; the output equals what results when the router weight is applied twice" in done.stdout
    assert "Traceback" not in done.stdout


def test_what_can_t_be_tested_is_an_error(folder: Path) -> None:
    done = run(folder, "--moe-experts", "mine:Elsewhere")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert (
        "mine:Elsewhere does not run on this machine's cpu device: it claims sm90 or newer" in done.stdout + done.stderr
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mine:Outdated", "mine:Outdated was built for plug-in protocol 99; this moe-core speaks protocol"),
        ("mine:Raises", "no cases of mine:Raises: KeyError: 'boo' ("),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(folder: Path, spec: str, message: str) -> None:
    done = run(folder, "--moe-experts", spec)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    text = done.stdout + done.stderr
    assert f"ERROR: {message}" in text
    assert "Traceback" not in text
    assert "INTERNALERROR" not in text
