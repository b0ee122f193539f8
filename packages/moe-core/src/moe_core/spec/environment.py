"""What is installed, as a value, so that selection stays a pure function; the switch for checks of values."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from moe_core.errors import ConfigError


@dataclass(frozen=True)
class Requirement:
    """A module that a backend needs at run time.

    ``module`` to import, ``distribution`` that brings it, the lowest ``version`` that
    works, and the pip requirement that adds it.  ``copies``: modules of other packages that hold the same library,
    taken where ``module`` is not there.
    """

    module: str
    distribution: str
    version: str = ""
    install: str = ""
    copies: tuple[str, ...] = ()

    @property
    def to_install(self) -> str:
        """What pip is asked for."""
        return self.install or self.distribution + (f">={self.version}" if self.version else "")

    @property
    def hint(self) -> str:
        return pip_requirements([self])

    def load(self) -> ModuleType:
        """The module, imported.  Raises ConfigError where none of its places holds it."""
        for name in (self.module, *self.copies):
            if _is_there(name):
                return importlib.import_module(name)
        raise ConfigError(f"{self.distribution} is not installed ({self.hint})")


def pip_requirements(requirements: Iterable[Requirement]) -> str:
    """The command that adds all ``requirements``."""
    return "pip install " + " ".join(dict.fromkeys(f"'{requirement.to_install}'" for requirement in requirements))


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
        return _installed(requirement)


@functools.cache
def _installed(requirement: Requirement) -> str | None:
    if _is_there(requirement.module):
        try:
            return importlib.metadata.version(requirement.distribution)
        except importlib.metadata.PackageNotFoundError:
            return ""
    # a copy states no version of its own
    return "" if any(map(_is_there, requirement.copies)) else None


def _is_there(module: str) -> bool:
    """Whether ``module`` can be found, without importing its parents."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not rest:
        return spec is not None
    folders = [Path(place).joinpath(*rest) for place in spec.submodule_search_locations or ()]
    return any((folder / "__init__.py").is_file() or folder.with_suffix(".py").is_file() for folder in folders)


_LIVE = _LiveEnvironment()


#: the environment variable that has calls look at the values of their arguments
CHECK = "MOE_CHECK"


def checks_values(environ: Mapping[str, str] | None = None) -> bool:
    """Whether calls look at the values of their arguments, for which the host waits for the device.

    Read when a layer is made: calls of others ask nothing.

    Args:
        environ: Default the process's.

    Raises:
        ConfigError: ``MOE_CHECK`` is neither 0 nor 1.
    """
    text = (os.environ if environ is None else environ).get(CHECK, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{CHECK} is {text!r}, expected 1 (calls check values) or 0")
    return text == "1"


def distribution_version(name: str) -> str | None:
    """The version of an installed distribution, None where it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def parse_version(text: str) -> tuple[int, ...]:
    """Release numbers of a version, enough to compare: "3.6.0+git1" -> (3, 6, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:4])
