"""``pytest --moe-experts``: the kit without a test file."""

from __future__ import annotations

from collections.abc import Callable

import pytest

EXPERTS = """
from dataclasses import replace
import torch
from moe_core import GATED, Claims, MoEActivation, any_device, cuda
from moe_core.reference.torch_experts import TorchExperts

class Mine(TorchExperts):
    interface_api = (1, 0)
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
    interface_api = (99, 0)

class Raises(Mine):
    @classmethod
    def extra_reasons(cls, *arguments):
        raise KeyError("boo")
"""


#: a plug-in that is installed beside, as any environment may have some, and stops every pytest that loads it
FOREIGN = """
def pytest_configure():
    raise RuntimeError("a plug-in of another package was loaded")
"""

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """pytest in a folder with the experts and a test of its own: in this process, or in one of its own.

    Of the plug-ins that are installed only the kit's is loaded, by the name of its entry point.
    """
    pytester.makepyfile(mine=EXPERTS, foreign=FOREIGN, test_other="def test_other():\n    pass\n")
    installed = pytester.mkdir("foreign-1.0.dist-info")
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[pytest11]\nforeign = foreign\n")
    pytester.syspathinsert()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def once(*arguments: str, subprocess: bool = False) -> pytest.RunResult:
        start = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        return start("-q", "-p", "no:cacheprovider", "-p", "moe-conformance", "--moe-device", "cpu", *arguments)

    return once


def test_sound_experts_pass_and_nothing_else_runs(run: Run) -> None:
    done = run("--moe-experts", "mine:Mine", "-k", "not compile and not opcheck")
    assert done.ret == 0
    assert " passed, 2 deselected" in done.stdout.str()
    listed = run("--moe-experts", "mine:Mine", "--collect-only").stdout.str()
    assert "mine:Mine::values-16bit-16bit-silu-float32-" in listed
    assert "test_other" not in listed


def test_other_tests_run_where_they_are_named(run: Run) -> None:
    # in a process of its own, whose options come by entry point
    done = run("test_other.py", "--moe-experts", "mine:Mine", "-k", "refusals or other", subprocess=True)
    assert done.ret == 0
    assert "2 passed" in done.stdout.str()


def test_a_failure_says_which_case_and_how_far(run: Run) -> None:
    done = run("--moe-experts", "mine:Wrong", "-k", "values", "-x")
    assert done.ret == 1
    out = done.stdout.str()
    assert "Wrong, case values-" in out
    assert "the error's norm is" in out
    assert "; the output equals what results when the router weight is applied twice" in out
    assert "Traceback" not in out


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mine:Elsewhere", "mine:Elsewhere does not run on this machine's cpu device: it claims sm90 or newer"),
        ("mine:Outdated", "mine:Outdated was built for interface_api 99.0; this moe-core offers"),
        ("mine:Raises", "no cases of mine:Raises: KeyError: 'boo' ("),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(run: Run, spec: str, message: str) -> None:
    done = run("--moe-experts", spec)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    text = done.stdout.str() + done.stderr.str()
    assert f"ERROR: {message}" in text
    assert "Traceback" not in text
    assert "INTERNALERROR" not in text
