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
SCHEMES = sorted(name for name, project in PROJECTS.items() if "moe_core.schemes" in project.get("entry-points", {}))


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

    def test_license_is_the_projects(self, name: str) -> None:
        assert (ROOT / "packages" / name / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_types_of_every_package_are_checked() -> None:
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    sources = {f"packages/{name}/src" for name in PROJECTS}
    assert set(mypy["mypy_path"]) == sources
    assert sources <= set(mypy["files"])


@pytest.mark.parametrize("name", sorted(PROJECTS.keys() - {"moe-core"}))
def test_package_needs_core_and_no_other_of_ours(name: str) -> None:
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
    groups = dict(workspace["dependency-groups"])
    assert all("==" in item for item in groups.pop("tools")), "the group states its versions, which are not constraints"
    wanted += [i for items in groups.values() for i in items if isinstance(i, str)]
    missing = {re.split(r"[=<>;\[ ]", item)[0] for item in wanted if not item.startswith("moe-")} - pins
    assert not missing, f"pin {sorted(missing)} with tools/pin.py"


# ------------------------------------------------------------------ what a reader and an index are shown

DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/*.md", "packages/*/*.md", "examples/*/*.md") for path in ROOT.glob(pattern)
)


def links(path: Path) -> list[str]:
    """Targets of a document's links, outside of its code."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)\s]+)", prose)


def anchors(path: Path) -> set[str]:
    """What links within a document may name: its headings, as sites that show Markdown write them."""
    headings = re.findall(r"^#+ +(.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in links(path):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{link}: {target.name} has no such heading"


@pytest.mark.parametrize("name", sorted(PROJECTS))
class TestWhatAnIndexShows:
    def test_readme_has_no_link_that_only_a_clone_can_follow(self, name: str) -> None:
        readme = ROOT / "packages" / name / PROJECTS[name]["readme"]
        assert not [link for link in links(readme) if not link.startswith(("https://", "#"))]

    def test_addresses_are_one_repository_and_name_what_is_there(self, name: str) -> None:
        home = PROJECTS["moe-core"]["urls"]["Homepage"]
        urls = PROJECTS[name]["urls"]
        assert urls.keys() == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
        for url in urls.values():
            assert url == home or url.startswith(f"{home}/")
            _, found, path = url.partition("/main/")
            assert not found or (ROOT / path).exists(), f"{url}: {path} is not there"
        assert urls["Source"].endswith(f"/packages/{name}")
        assert urls["Changelog"].endswith(f"/packages/{name}/CHANGELOG.md")

    def test_metadata_is_complete_and_that_of_the_others(self, name: str) -> None:
        project, core = PROJECTS[name], PROJECTS["moe-core"]
        assert 20 <= len(project["description"]) <= 200
        assert {"mixture-of-experts", "moe", "quantization"} <= set(project["keywords"])
        for key in ("classifiers", "requires-python", "license", "license-files"):
            assert project[key] == core[key]


def test_citation_is_of_this_version_and_address() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {PROJECTS['moe-core']['version']}\n" in citation
    assert f'\nrepository-code: "{PROJECTS["moe-core"]["urls"]["Homepage"]}"\n' in citation
    assert f"\nlicense: {PROJECTS['moe-core']['license']}\n" in citation


def test_the_extra_for_testing_brings_what_the_kit_and_our_tests_ask_for() -> None:
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())
    ours = {normal(item) for item in workspace["dependency-groups"]["test"] if isinstance(item, str)}
    extra = {normal(item) for item in PROJECTS["moe-core"]["optional-dependencies"]["testing"]}
    assert {re.split(r"[><=]", item)[0] for item in extra} == {"pytest", "hypothesis"}
    assert extra <= ours
    installed = importlib.metadata.distribution("moe-core")
    assert "testing" in (installed.metadata.get_all("Provides-Extra") or ())


def test_the_workflow_runs_the_readmes_command_on_every_python() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert "- run: .ci/run\n" in workflow
    pythons = re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.*)\]", workflow).group(1))  # type: ignore[union-attr]
    stated = [c.rpartition(" ")[2] for c in PROJECTS["moe-core"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert pythons == stated
    assert "permissions:\n  contents: read\n" in workflow
    # actions are pinned to a major version, and nothing is fetched from elsewhere
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", used) for used in re.findall(r"uses: (\S+)", workflow))
