"""What the packages declare is what is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PROJECTS: dict[str, dict[str, Any]] = {
    path.parent.name: tomllib.loads(path.read_text())["project"] for path in ROOT.glob("packages/*/pyproject.toml")
}
SCHEMES = sorted(PROJECTS.keys() - {"moe-core"})


def normal(requirement: str) -> str:
    """A requirement as one string per meaning: sorted bounds, no spaces, one kind of quotes."""
    bounds, _, marker = requirement.replace(" ", "").replace('"', "'").partition(";")
    match = re.match(r"[\w\-\[\]]+", bounds)
    assert match is not None, requirement
    return f"{match.group()}{','.join(sorted(bounds[match.end() :].split(',')))};{marker}"


@pytest.mark.parametrize("name", sorted(PROJECTS))
class TestEveryPackage:
    def test_installed_metadata_is_that_of_the_source(self, name: str) -> None:
        project, installed = PROJECTS[name], importlib.metadata.distribution(name)
        assert installed.version == project["version"]
        wanted = {normal(item) for item in project["dependencies"]}
        assert {normal(item) for item in installed.requires or () if "extra==" not in item.replace(" ", "")} == wanted
        declared = {(g, k, v) for g, points in project.get("entry-points", {}).items() for k, v in points.items()}
        declared |= {("console_scripts", key, value) for key, value in project.get("scripts", {}).items()}
        assert {(point.group, point.name, point.value) for point in installed.entry_points} == declared

    def test_is_typed(self, name: str) -> None:
        spec = importlib.util.find_spec(name.replace("-", "_"))
        assert spec is not None
        assert spec.origin is not None
        assert Path(spec.origin).with_name("py.typed").is_file()

    def test_changelog_tells_of_this_version(self, name: str) -> None:
        changelog = (ROOT / "packages" / name / "CHANGELOG.md").read_text()
        assert re.search(rf"^## {re.escape(PROJECTS[name]['version'])}\b", changelog, re.MULTILINE)

    def test_licence_is_the_projects(self, name: str) -> None:
        assert (ROOT / "packages" / name / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("name", SCHEMES)
def test_scheme_needs_core_and_no_other_scheme(name: str) -> None:
    ours = [normal(item) for item in PROJECTS[name]["dependencies"] if item.startswith("moe-")]
    assert ours == [normal("moe-core>=0.1,<0.2")]


def test_core_needs_no_scheme() -> None:
    assert not [item for item in PROJECTS["moe-core"]["dependencies"] if item.startswith("moe-")]


def test_core_states_its_version() -> None:
    import moe_core

    assert moe_core.__version__ == PROJECTS["moe-core"]["version"]


@pytest.mark.parametrize("name", SCHEMES)
def test_scheme_is_registered(name: str) -> None:
    """Under the name that its package has, and as nothing else."""
    points = importlib.metadata.distribution(name).entry_points
    assert [(point.group, point.name) for point in points] == [("moe_core.schemes", name.removeprefix("moe-"))]


def test_every_direct_dependency_is_pinned() -> None:
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = {re.split(r"[=<>;\[ ]", pin)[0] for pin in workspace["tool"]["uv"]["constraint-dependencies"]}
    wanted = [item for project in PROJECTS.values() for item in project["dependencies"]]
    wanted += [i for items in workspace["dependency-groups"].values() for i in items if isinstance(i, str)]
    missing = {re.split(r"[=<>;\[ ]", item)[0] for item in wanted if not item.startswith("moe-")} - pins
    assert not missing, f"pin {sorted(missing)} with tools/pin.py"
