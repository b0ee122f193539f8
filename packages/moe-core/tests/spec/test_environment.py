"""What is installed: where a library may lie, and what is said where it does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from moe_core.errors import ConfigError
from moe_core.spec.environment import Environment, Requirement, _installed

MODULE = "moe_core_test_library"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    _installed.cache_clear()
    yield tmp_path
    _installed.cache_clear()
    for name in [name for name in sys.modules if name.startswith((MODULE, "moe_core_test_engine"))]:
        del sys.modules[name]


def write(folder: Path, text: str = "") -> None:
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(text)


COPIED = Requirement(MODULE, "moe-core-test", "2.0", copies=(f"moe_core_test_engine.third_party.{MODULE}",))


def test_missing(place: Path) -> None:
    environment = Environment.current()
    assert environment.version(COPIED) is None
    assert "needs moe-core-test, which is not installed" in str(environment.reason_against(COPIED))
    with pytest.raises(ConfigError, match="moe-core-test"):
        COPIED.load()


def test_versions() -> None:
    assert Environment({"moe-core-test": "2.0"}).reason_against(COPIED) is None
    assert Environment({"moe-core-test": None}).reason_against(COPIED) is None
    older = Environment({"moe-core-test": "1.10"}).reason_against(COPIED)
    assert str(older).startswith("needs moe-core-test >= 2.0, found 1.10 ")
    assert "which is not installed" in str(Environment({"other": "2.0"}).reason_against(COPIED))


def test_a_copy_is_found_without_importing_what_holds_it(place: Path) -> None:
    write(place / "moe_core_test_engine", "raise RuntimeError('imported')")
    assert Environment.current().version(COPIED) is None
    _installed.cache_clear()
    write(place / "moe_core_test_engine" / "third_party")
    write(place / "moe_core_test_engine" / "third_party" / MODULE, "where = 'copy'")
    assert Environment.current().reason_against(COPIED) is None
    (place / "moe_core_test_engine" / "__init__.py").write_text("")
    assert COPIED.load().where == "copy"


def test_the_library_itself_comes_before_a_copy(place: Path) -> None:
    write(place / "moe_core_test_engine")
    write(place / "moe_core_test_engine" / "third_party" / MODULE, "where = 'copy'")
    write(place / MODULE, "where = 'itself'")
    assert COPIED.load().where == "itself"
