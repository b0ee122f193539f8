"""Commands that other packages bring, in the group ``moe_core.commands``."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from moe_core.cli import installed
from moe_core.cli.grammar import COMMANDS

GREET = """
from moe_core.api.command_line import Command, whole

def arguments(parser):
    parser.add_argument("--times", type=whole, default=1, help="how often")

COMMAND = Command("says who it is", arguments, "greet_work:run", "It says no more.")
"""
GREET_WORK = """
from moe_core import ConfigError
from moe_core.api.commands import emit

def run(arguments):
    if arguments.times < 1:
        raise ConfigError(f"--times {arguments.times}: expected 1 or more")
    emit(arguments.json, {"times": arguments.times}, "greet " * arguments.times)
    return 1 if arguments.times > 2 else 0
"""
MODULES = {"greet": GREET, "greet_work": GREET_WORK, "broken": "raise RuntimeError('no disk')", "other": "COMMAND = 3"}


class Distribution(importlib.metadata.Distribution):
    """One that is nowhere but here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: 1.0\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


@pytest.fixture
def install(plain: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """``install(name="module:COMMAND")``: packages with these commands, one each."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    schemes = importlib.metadata.entry_points

    def install(*pairs: tuple[str, str]) -> None:
        points = tuple(
            EntryPoint(name, value, installed.GROUP)._for(Distribution(f"package-{i}"))  # type: ignore[attr-defined]
            for i, (name, value) in enumerate(pairs)
        )
        monkeypatch.setattr(
            importlib.metadata,
            "entry_points",
            lambda *, group: points if group == installed.GROUP else schemes(group=group),
        )

    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return install


def test_own_commands_have_their_names_reserved() -> None:
    assert tuple(COMMANDS) == installed.OWN


def test_a_command_runs(install: Callable[..., None], moe: Any) -> None:
    install(("greet", "greet:COMMAND"), ("other", "other:COMMAND"))
    assert moe("greet", "--times", 2).out == "greet greet \n"
    assert moe("greet", "--json").data == {"times": 1}
    assert moe("greet", "--times", 3).code == 1
    moe.refuses("greet", "--times", 0, parts=("--times 0: expected 1 or more",))
    moe.refuses("greet", "--times", "x", parts=("expected an integer",))
    moe.refuses("greet", "--time", parts=("expected one argument",))
    assert moe("backends").code == 0
    # nobody asked for it
    assert "other" not in sys.modules


def test_help(install: Callable[..., None], moe: Any) -> None:
    install(("greet", "greet:COMMAND"), ("broken", "broken:COMMAND"))
    out = moe("--help").out
    assert "\n  greet       says who it is\n" in out
    assert "\n  broken      broken:COMMAND cannot be loaded: RuntimeError: no disk" in out
    out = moe("greet", "--help").out
    assert "moe greet: says who it is.\n\nIt says no more." in out
    assert "--times" in out
    assert "--json" in out
    assert "greet_work" not in sys.modules


def test_names_are_meant(install: Callable[..., None], moe: Any) -> None:
    install(("greet", "greet:COMMAND"))
    assert moe("gret").err == "moe: unknown command 'gret'; did you mean 'greet'? (moe --help)\n"


def test_commands_of_packages_that_are_not_installed(install: Callable[..., None], moe: Any) -> None:
    install()
    message = "'generate' is a command of moe-transformers, which is not installed; add it with: pip install "
    assert moe("generate").err.startswith(f"moe: {message}")
    missing = {item["what"]: item for item in moe("doctor", "--json").data["missing"]}
    assert missing["moe-transformers"]["why"] == "brings moe generate and moe perplexity"
    assert missing["moe-transformers"]["command"].startswith("pip install ")


def test_doctor_lists_packages_that_bring_commands(install: Callable[..., None], moe: Any, tmp_path: Path) -> None:
    """Reports of faults state versions by it: of packages without a scheme too."""
    folder = tmp_path / "package_0-1.5.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: package-0\nVersion: 1.5\n")
    install(("greet", "greet:COMMAND"))
    assert moe("doctor", "--json").data["versions"]["package-0"] == "1.5"


@pytest.mark.parametrize(
    ("pairs", "name", "reason"),
    [
        ([("broken", "broken:COMMAND")], "broken", "broken:COMMAND cannot be loaded: RuntimeError: no disk"),
        ([("other", "other:COMMAND")], "other", "other:COMMAND is of type int, expected a Command"),
        ([("x", "nowhere:COMMAND")], "x", "nowhere:COMMAND cannot be loaded: ModuleNotFoundError: No module named"),
        (
            [("greet", "greet:COMMAND"), ("greet", "other:COMMAND")],
            "greet",
            "other:COMMAND of package-1 1.0 has the same name; uninst",
        ),
    ],
)
def test_what_does_not_work_is_named(
    install: Callable[..., None], moe: Any, pairs: list[tuple[str, str]], name: str, reason: str
) -> None:
    install(*pairs)
    told = f"command {name!r} of package-0 1.0 is left out: {reason}"
    assert told in moe(name).err
    assert moe(name).code == 2
    assert moe("backends").code == 0
    doctor = moe("doctor")
    assert doctor.code == 1
    assert told in doctor.out


def test_names_of_moe_core_are_its_own(install: Callable[..., None], moe: Any) -> None:
    install(("doctor", "greet:COMMAND"))
    result = moe("doctor")
    assert "command 'doctor' of package-0 1.0 is left out: the name is moe-core's" in result.out
    assert "greet" not in sys.modules


def test_work_that_cannot_be_imported(install: Callable[..., None], moe: Any, tmp_path: Path) -> None:
    install(("greet", "greet:COMMAND"))
    (tmp_path / "greet_work.py").write_text("import a_library_that_is_not_here")
    moe.refuses("greet", parts=("greet_work:run cannot be loaded: ModuleNotFoundError: No module named 'a_library_",))
