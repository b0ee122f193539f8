"""Load the experts class that the conformance kit is asked to test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from moe_core.errors import ConfigError, MoEError, did_you_mean
from moe_core.interface.experts import FusedMoEExperts
from moe_core.plugins.backend import checked_experts, reason_against_class
from moe_core.plugins.faults import Raised, attempt
from moe_core.selection.registry import registry

SPELLING = 'experts are named "module:Class", e.g. my_package.experts:MyExperts'


def load_experts(spec: type[FusedMoEExperts] | str) -> type[FusedMoEExperts]:
    """Return an experts class, given itself or its name.

    Args:
        spec: Experts class, or its name as "module:Class".

    Returns:
        The class.

    Raises:
        ConfigError: The import raises anything, or the object is not a valid experts class.
    """
    found = _named(spec) if isinstance(spec, str) else spec
    name = spec if isinstance(spec, str) else getattr(spec, "__name__", repr(spec))
    reason = attempt(lambda: reason_against_class(found))
    if isinstance(reason, Raised):
        raise ConfigError(f"{name} cannot be examined: {reason}") from reason.error
    if reason is not None:
        raise ConfigError(f"{name} {reason}")
    return found  # type: ignore[return-value]


def load_plugin(spec: type[FusedMoEExperts] | str, *, doubles: bool = False) -> type[FusedMoEExperts]:
    """Load a class and refuse what the registry would refuse as a backend.

    Loading is as in :func:`load_experts`.

    A class from a package that registers a scheme needs no ``interface_api``, since the scheme states one for its whole
    package.

    Args:
        spec: Experts class, or its name as "module:Class".
        doubles: Whether the same holds for a subclass of such a class, such as a test double.

    Returns:
        The class.

    Raises:
        ConfigError: The class cannot be loaded or is not a valid backend.
        ProtocolVersionError: It implements an unsupported version of the interface.
    """
    found = load_experts(spec)
    covered = registry().scheme_packages()
    if any(each.__module__.partition(".")[0] in covered for each in (found.__mro__ if doubles else (found,))):
        return found
    try:
        return checked_experts(found)
    except MoEError as error:
        name = spec if isinstance(spec, str) else found.__name__
        raise type(error)(f"{name} {error.message}", details=error.details) from error


def _named(spec: str) -> object:
    module, _, name = spec.partition(":")
    if not module or not name.isidentifier():
        raise ConfigError(f"{SPELLING}, got {spec!r}")
    if "/" in module or "\\" in module or module.endswith(".py"):
        stem = Path(module.replace("\\", "/")).stem
        raise ConfigError(f"{SPELLING}, got a file: {spec!r}; for a module of that name: {stem}:{name}")
    loaded = attempt(_importing(module))
    if isinstance(loaded, Raised):
        hint, error = "", loaded.error
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            hint = f"; install the package that has it, or name its folder in PYTHONPATH (here: {Path.cwd()})"
        raise ConfigError(f"{spec} can't be imported: {loaded}{hint}") from error
    try:
        return getattr(loaded, name)
    except AttributeError as error:
        there = [item for item, value in vars(loaded).items() if _is_experts(value, module)]
        known = f"; it has {', '.join(sorted(there))}" if there else "; it has no experts class"
        raise ConfigError(f"module {module!r} has no {name!r}{did_you_mean(name, there) or known}") from error


def _importing(module: str) -> Callable[[], object]:
    def load() -> object:
        importlib.import_module(module)
        return sys.modules[module]

    return load


def _is_experts(value: object, module: str) -> bool:
    # issubclass would call hooks of every existing subclass, including those of a broken plug-in.
    return isinstance(value, type) and FusedMoEExperts in value.__mro__ and value.__module__ == module
