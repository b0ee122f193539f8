"""Installed software as a value, which keeps backend selection a pure function.

Also the switch for value checks (``MOE_CHECK``) and version helpers.
"""

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
    """Python module that a backend needs at run time.

    Attributes:
        module: Module to import.
        distribution: Distribution that provides the module.
        version: Lowest version that works; empty: any.
        install: pip requirement that installs it; empty: derived from distribution and version.
        copies: Modules of other packages that contain the same library, used if ``module`` is missing.
    """

    module: str
    distribution: str
    version: str = ""
    install: str = ""
    copies: tuple[str, ...] = ()

    @property
    def to_install(self) -> str:
        """pip requirement that installs the module."""
        return self.install or self.distribution + (f">={self.version}" if self.version else "")

    @property
    def hint(self) -> str:
        """pip command that installs the module."""
        return pip_requirements([self])

    def load(self) -> ModuleType:
        """Import the module, or the first of its copies that is installed.

        Returns:
            The module.

        Raises:
            ConfigError: Neither the module nor a copy is installed.
        """
        for name in (self.module, *self.copies):
            if _is_there(name):
                return importlib.import_module(name)
        raise ConfigError(f"{self.distribution} is not installed ({self.hint})")


def pip_requirements(requirements: Iterable[Requirement]) -> str:
    """Build the pip command that installs all ``requirements``.

    Args:
        requirements: The missing requirements.

    Returns:
        The command.
    """
    return "pip install " + " ".join(dict.fromkeys(f"'{requirement.to_install}'" for requirement in requirements))


TRITON = Requirement("triton", "triton", "3.6")


@dataclass(frozen=True)
class Environment:
    """Installed distributions and their versions.

    Attributes:
        versions: Version by distribution; None if the version is unknown.
    """

    versions: Mapping[str, str | None] = field(default_factory=dict)

    @staticmethod
    def current() -> Environment:
        """Return the environment of this interpreter; each distribution is looked up once."""
        return _LIVE

    def version(self, requirement: Requirement) -> str | None:
        """Get the installed version of a requirement.

        Args:
            requirement: The requirement.

        Returns:
            The version; "" if the module is installed without a version; None if it is missing.
        """
        if requirement.distribution in self.versions:
            return self.versions[requirement.distribution] or ""
        return None

    def reason_against(self, requirement: Requirement) -> str | None:
        """Explain why a requirement is not met.

        Args:
            requirement: The requirement.

        Returns:
            The reason, or None if it is met.
        """
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
    # The version of a copy is unknown.
    return "" if any(map(_is_there, requirement.copies)) else None


def _is_there(module: str) -> bool:
    """Whether ``module`` can be found, without importing its parent packages."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not rest:
        return spec is not None
    folders = [Path(place).joinpath(*rest) for place in spec.submodule_search_locations or ()]
    return any((folder / "__init__.py").is_file() or folder.with_suffix(".py").is_file() for folder in folders)


_LIVE = _LiveEnvironment()


#: Environment variable that makes calls check the values of their arguments.
CHECK = "MOE_CHECK"


def checks_values(environ: Mapping[str, str] | None = None) -> bool:
    """Whether calls check the values of their arguments.

    The check makes the host wait for the device.

    The variable is read once, when a layer is created, so other layers pay nothing per call.

    Args:
        environ: Environment variables; default: those of the process.

    Returns:
        True if ``MOE_CHECK`` is 1.

    Raises:
        ConfigError: ``MOE_CHECK`` is neither 0 nor 1.
    """
    text = (os.environ if environ is None else environ).get(CHECK, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{CHECK} is {text!r}, expected 1 (calls check values) or 0")
    return text == "1"


def distribution_version(name: str) -> str | None:
    """Get the version of an installed distribution.

    Args:
        name: Name of the distribution.

    Returns:
        The version, or None if it is not installed.
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def parse_version(text: str) -> tuple[int, ...]:
    """Parse the release numbers of a version, enough to compare: "3.6.0+git1" -> (3, 6, 0).

    Args:
        text: The version.

    Returns:
        Up to four numbers.
    """
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:4])
