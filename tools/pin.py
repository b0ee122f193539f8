"""Update the versions that CI uses: the constraint lists in the root pyproject.toml.

Usage: ``python tools/pin.py`` resolves the newest versions that the packages and the dependency groups allow, for all
supported Python versions, and writes them in place. ``uv`` must be on the PATH.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYPROJECT = ROOT / "pyproject.toml"
#: Group that states exact versions, which may differ from those that other groups require.
EXACT = "tools"


def resolve(requirements: list[str]) -> list[str]:
    """Resolve the newest versions of requirements and their dependencies.

    Args:
        requirements: Requirements.

    Returns:
        One exact pin each.
    """
    command = ["uv", "pip", "compile", "--universal", "--python-version", "3.11", "--no-header", "--no-annotate", "-"]
    with tempfile.TemporaryDirectory() as empty:  # Run outside of the workspace, whose constraints would apply.
        done = subprocess.run(
            command, input="\n".join(requirements), text=True, capture_output=True, check=True, cwd=empty
        )
    pins = []
    for line in done.stdout.splitlines():
        pin, _, marker = (part.strip() for part in line.partition(";"))
        # Platform markers state where a package is needed, which a constraint need not repeat. Python markers
        # distinguish two versions of one package.
        versions = re.findall(r"python_full_version [<>=]+ '3\.1[1-3]'", marker)
        pins.append(f"{pin}; {' and '.join(versions)}" if versions else pin)
    return pins


def write(text: str, key: str, pins: list[str]) -> str:
    """Replace a list of pins.

    Args:
        text: Text of pyproject.toml.
        key: Name of the list.
        pins: New content.

    Returns:
        The new text.
    """
    lines = "".join(f'  "{pin}",\n' for pin in pins)
    new, count = re.subn(
        rf"^{key} = \[\n.*?^\]", lambda _: f"{key} = [\n{lines}]", text, flags=re.DOTALL | re.MULTILINE
    )
    if count != 1:
        raise SystemExit(f"{PYPROJECT} holds {count} lists named {key}, expected one")
    return new


def main() -> None:
    """Resolve and write both lists."""
    text = PYPROJECT.read_text()
    groups = tomllib.loads(text)["dependency-groups"]
    wanted = [item for name, items in groups.items() if name != EXACT for item in items if isinstance(item, str)]
    backends: set[str] = set()
    for path in ROOT.glob("packages/*/pyproject.toml"):
        content = tomllib.loads(path.read_text())
        project = content["project"]
        extras = [item for items in project.get("optional-dependencies", {}).values() for item in items]
        wanted += [item for item in [*project["dependencies"], *extras] if not item.startswith("moe-core")]
        backends |= set(content["build-system"]["requires"])
    text = write(text, "constraint-dependencies", resolve(sorted(set(wanted))))
    text = write(text, "build-constraint-dependencies", resolve(sorted(backends)))
    PYPROJECT.write_text(text)


if __name__ == "__main__":
    main()
