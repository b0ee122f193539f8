"""Check the contents of built wheels: typed, licensed, with entry points, without tests.

Usage: ``python tools/check_wheels.py DIST``, where DIST holds one wheel and one sdist of every package.
"""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

PACKAGES = Path(__file__).parent.parent / "packages"


def relative_links(markdown: object) -> list[str]:
    """Return the link targets that a package index cannot resolve, since it only shows the text.

    Args:
        markdown: The text.

    Returns:
        Relative targets.
    """
    targets = re.findall(r"\]\(([^)\s]+)", str(markdown))
    return [target for target in targets if not target.startswith(("https://", "#", "mailto:"))]


def problems_of(wheel: Path, project: dict[str, object]) -> list[str]:
    """Return the problems of one wheel.

    Args:
        wheel: The wheel.
        project: ``[project]`` of the package's pyproject.toml.

    Returns:
        Sentences; empty if there are no problems.
    """
    distribution = str(project["name"]).replace("-", "_")
    info = f"{distribution}-{project['version']}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        entry_points = archive.read(f"{info}/entry_points.txt").decode() if f"{info}/entry_points.txt" in names else ""
    problems = [
        f"lacks {needed}"
        for needed in (f"{distribution}/__init__.py", f"{distribution}/py.typed", f"{info}/licenses/LICENSE")
        if needed not in names
    ]
    ours = {distribution, info}
    problems += [f"carries {name}, outside {distribution}/" for name in names if name.partition("/")[0] not in ours]
    problems += [f"carries the test {name}" for name in names if {"tests", "test"} & set(Path(name).parts[:-1])]
    problems += [f"carries the test {name}" for name in names if Path(name).name.startswith(("test_", "conftest"))]
    problems += [f"carries the leftover {name}" for name in names if name.endswith((".pyc", ".so", ".orig"))]
    if metadata["License-Expression"] != "Apache-2.0" or not metadata.get_payload():
        problems.append("has no license expression or no README in its metadata")
    problems += [f"has the relative link {link} in its description" for link in relative_links(metadata.get_payload())]
    if len(metadata.get_all("Project-URL") or ()) < 4:
        problems.append("names fewer than four addresses of the project")
    declared: dict[str, dict[str, str]] = dict(project.get("entry-points", {}))  # type: ignore[call-overload]
    if "scripts" in project:
        declared["console_scripts"] = project["scripts"]  # type: ignore[assignment]
    for section, entries in declared.items():
        if f"[{section}]" not in entry_points:
            problems.append(f"lacks the entry points [{section}]")
        problems += [f"lacks the entry point {name} = {v}" for name, v in entries.items() if v not in entry_points]
    return problems


def main(dist: Path) -> int:
    """Check every package's wheel and sdist.

    Args:
        dist: Folder of the wheels and sdists.

    Returns:
        Number of problems.
    """
    count = 0
    for pyproject in sorted(PACKAGES.glob("*/pyproject.toml")):
        project = tomllib.loads(pyproject.read_text())["project"]
        stem = f"{project['name'].replace('-', '_')}-{project['version']}"
        wheel, sdist = dist / f"{stem}-py3-none-any.whl", dist / f"{stem}.tar.gz"
        problems = [f"{path.name} was not built" for path in (wheel, sdist) if not path.exists()]
        if not problems:
            problems = problems_of(wheel, project)
            with tarfile.open(sdist) as archive:
                if f"{stem}/src/{project['name'].replace('-', '_')}/py.typed" not in archive.getnames():
                    problems.append("the sdist lacks the package's sources")
        for problem in problems:
            print(f"{project['name']}: {problem}")
        print(f"{wheel.name}: {'ok' if not problems else f'{len(problems)} problems'}")
        count += len(problems)
    return count


if __name__ == "__main__":
    sys.exit(1 if main(Path(sys.argv[1])) else 0)
