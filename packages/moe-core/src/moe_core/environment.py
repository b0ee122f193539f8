"""What is installed, as a value, so that selection stays a pure function."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Requirement:
    """A module that a backend needs at run time.

    ``module`` to import, ``distribution`` that brings it, the lowest ``version`` that
    works, and the pip requirement that adds it.
    """

    module: str
    distribution: str
    version: str = ""
    install: str = ""

    @property
    def hint(self) -> str:
        return f"pip install '{self.install or self.distribution + (f'>={self.version}' if self.version else '')}'"


TRITON = Requirement("triton", "triton", "3.6")


@dataclass(frozen=True)
class Environment:
    """Installed distributions and their versions (``None`` where the version is unknown)."""

    versions: Mapping[str, str | None] = field(default_factory=dict)

    @staticmethod
    def current() -> Environment:
        """What this interpreter can import; looked up once per distribution."""
        return _LIVE

    def version(self, requirement: Requirement) -> str | None:
        """The installed version, "" if it is there without one, None if it is missing."""
        if requirement.distribution in self.versions:
            return self.versions[requirement.distribution] or ""
        return None

    def reason_against(self, requirement: Requirement) -> str | None:
        """Why the requirement is not met, or None."""
        found = self.version(requirement)
        if found is None:
            return f"needs {requirement.distribution}, which is not installed ({requirement.hint})"
        if found and requirement.version and parse_version(found) < parse_version(requirement.version):
            return f"needs {requirement.distribution} >= {requirement.version}, found {found} ({requirement.hint})"
        return None


class _LiveEnvironment(Environment):
    def version(self, requirement: Requirement) -> str | None:
        return _installed(requirement.module, requirement.distribution)


@functools.cache
def _installed(module: str, distribution: str) -> str | None:
    # find_spec of a submodule imports its parents, so only the top-level name is asked for
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


_LIVE = _LiveEnvironment()


def parse_version(text: str) -> tuple[int, ...]:
    """Release numbers of a version, enough to compare: "3.6.0+git1" -> (3, 6, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:4])
