from __future__ import annotations

import importlib.metadata
import shlex
from pathlib import Path
from typing import Any

import pytest
from moe_core.plugins import install
from moe_core.plugins.install import _origin as origin


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda **record: monkeypatch.setattr(install, "_origin", lambda: record)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("moe-core", "moe-int8"):
        (tmp_path / "a clone" / "packages" / name).mkdir(parents=True)
        (tmp_path / "a clone" / "packages" / name / "pyproject.toml").touch()
    return tmp_path / "a clone"


def test_from_an_index(recorded: Any) -> None:
    recorded()
    assert install.pip_command("moe-int8") == "pip install moe-int8"
    assert install.pip_command("moe-int8", upgrade=True) == "pip install --upgrade moe-int8"
    assert install.how_to_install("moe-int8") == ("pip install moe-int8 (in a clone: pip install ./packages/moe-int8)")


@pytest.mark.parametrize("editable", [False, True])
def test_from_a_clone(recorded: Any, clone: Path, monkeypatch: pytest.MonkeyPatch, editable: bool) -> None:
    recorded(url=(clone / "packages" / "moe-core").as_uri(), dir_info={"editable": editable})
    option = ["-e"] if editable else []
    path = str(clone / "packages" / "moe-int8")
    assert shlex.split(install.pip_command("moe-int8")) == ["pip", "install", *option, path]
    assert install.how_to_install("moe-int8") == install.pip_command("moe-int8")
    monkeypatch.chdir(clone)
    command = install.pip_command("moe-int8", upgrade=True)
    assert shlex.split(command) == ["pip", "install", "--upgrade", *option, "./packages/moe-int8"]
    # a package that is not there
    assert install.pip_command("moe-fp8") == "pip install moe-fp8"


def test_from_a_wheel(recorded: Any, tmp_path: Path) -> None:
    recorded(url=(tmp_path / "moe_core-0.1.0-py3-none-any.whl").as_uri(), archive_info={})
    assert install.pip_command("moe-int8") == "pip install moe-int8"
    wheel = tmp_path / "moe_int8-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert install.pip_command("moe-int8") == f"pip install {wheel}"


def test_from_a_repository(recorded: Any) -> None:
    url = "https://example.org/moe.git"
    revision = {"vcs": "git", "commit_id": "abc"}
    recorded(url=url, vcs_info=revision, subdirectory="packages/moe-core")
    expected = f"moe-int8 @ git+{url}@abc#subdirectory=packages/moe-int8"
    assert shlex.split(install.pip_command("moe-int8")) == ["pip", "install", expected]
    recorded(url=url, vcs_info=revision)
    assert install.pip_command("moe-int8") == "pip install moe-int8"


@pytest.mark.parametrize("record", [{"url": 7}, {"url": "https://example.org/moe_core.whl", "archive_info": {}}])
def test_records_that_say_nothing(recorded: Any, record: dict[str, Any]) -> None:
    recorded(**record)
    assert install.pip_command("moe-int8") == "pip install moe-int8"


@pytest.mark.parametrize("text", [None, "", "{", "[1]", '{"url": "file:///x", "dir_info": {}}'])
def test_what_pip_recorded(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return text

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    assert origin() == ({"url": "file:///x", "dir_info": {}} if text and "url" in text else {})


def test_not_installed_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    assert origin() == {}
