"""Errors of plug-ins become faults; Ctrl-C interrupts plug-ins."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from moe_core import PluginFault, Registry, RegistryError
from moe_core.plugins.entry_points import installed
from moe_core.plugins.faults import Raised, attempt


class WithoutText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a\n  b"), "ValueError: a b"),
        (SystemExit(0), "SystemExit: 0"),
        (WithoutText(), "WithoutText"),
        (ValueError("x" * 10_000), f"ValueError: {'x' * 500} …"),
    ],
)
def test_whatever_is_raised_is_returned(error: BaseException, text: str) -> None:
    found = attempt(lambda: raise_(error))
    assert isinstance(found, Raised)
    assert found.error is error
    assert str(found) == text


def test_results_are_returned() -> None:
    assert attempt(lambda: 7) == 7


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(5)


def test_ctrl_c_interrupts_what_a_plugin_does() -> None:
    with pytest.raises(KeyboardInterrupt):
        attempt(press_ctrl_c)


def test_ctrl_c_ends_a_program_while_it_imports_a_plugin(tmp_path: Path) -> None:
    (tmp_path / "slow_plugin.py").write_text("import os, time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    code = (
        "from importlib.metadata import EntryPoint\nfrom moe_core import Registry\n"
        "Registry(lambda group: [EntryPoint('slow', 'slow_plugin:X', group)]).schemes()\nprint('went on')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", code]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"importing\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert b"went on" not in out
    assert b"KeyboardInterrupt" in err
    assert child.returncode != 0


def test_the_error_of_a_fault_is_new_each_time() -> None:
    cause = OSError("why")
    fault = PluginFault("backend", "toy.x", "moe-x 1.0", "it fails", cause)
    first, second = fault.error(), fault.error()
    assert first is not second
    assert isinstance(first, RegistryError)
    assert first.__cause__ is cause
    assert str(first) == "backend 'toy.x' of moe-x 1.0 cannot be used: it fails"


def test_an_unreadable_list_of_entry_points_hides_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("moe-garbled", "[moe_core.schemes]\nno equals sign here\n"),
        ("moe-fine", "[moe_core.schemes]\nfine = moe_fine:SCHEME\n"),
    ):
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = installed("moe_core.schemes")
    assert [point.name for point in found if isinstance(point, importlib.metadata.EntryPoint)] == ["fine"]
    (fault,) = (point for point in found if isinstance(point, PluginFault))
    named = "distribution 'moe-garbled' of moe-garbled 1.0 is left out: its entry points cannot be read"
    assert str(fault).startswith(named)
    plugins = Registry(installed)
    assert plugins.scheme_names() == ("fine",)
    assert fault in plugins.faults()
