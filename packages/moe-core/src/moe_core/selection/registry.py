"""Find schemes, backends and formats through entry points.

Groups:

- ``moe_core.schemes``: ``fp8 = "moe_fp8.scheme:SCHEME"``, a :class:`~moe_core.plugins.scheme.SchemeSpec`. Its name has
  no dot.
- ``moe_core.backends``: ``fp8.mine = "my_package:MyExperts"``, an experts class for the scheme before the dot, named by
  the part after it. The class states ``interface_api = (1, 0)``, the version it was written for.
- ``moe_core.formats``: ``fp8.mine = "my_package:MyFormat"``, a checkpoint format of that scheme. It states ``format_api
  = (1, 0)``.

Entry points are collected once per process and loaded on first use, in any number of threads.

A broken plug-in is left out and everything else works. :meth:`Registry.faults` and a PluginWarning name it, its
distribution and the cause; requesting it by name raises RegistryError with the same information.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, TypeVar, cast

from moe_core.errors import (
    ConfigError,
    MoEError,
    RegistryError,
    SchemeNotInstalledError,
    check_instance,
    did_you_mean,
    with_widths_of,
)
from moe_core.interface.versions import check_api
from moe_core.plugins.backend import Backend, checked_experts
from moe_core.plugins.entry_points import imported, installed, load_named, owner
from moe_core.plugins.faults import PluginFault, Raised, attempt, derives, split, warn_of
from moe_core.plugins.install import how_to_install
from moe_core.plugins.scheme import SchemeSpec
from moe_core.selection.oracle import Oracle

if TYPE_CHECKING:
    from moe_core.interface.checkpoint_format import CheckpointFormat
    from moe_core.kernels.ops.online import OnlineQuantization

SCHEME_GROUP = "moe_core.schemes"
BACKEND_GROUP = "moe_core.backends"
FORMAT_GROUP = "moe_core.formats"
#: Groups of additions to a scheme, and the kind of each.
_ADDED = {BACKEND_GROUP: "backend", FORMAT_GROUP: "format"}

V = TypeVar("V")

#: Tuples of a SchemeSpec, and the type of their items. A broken format or online quantization is left out alone.
_TUPLES = {"backends": Backend, "quant_methods": str, "formats": object, "online": object, "kinds": object}

#: Packages of this project that provide a scheme: for hints in errors, and to decide which of two packages owns a name.
#: Installed packages are not looked up here.
KNOWN_SCHEMES = {
    "fp8": "moe-fp8",
    "mxfp4": "moe-mxfp4",
    "int8": "moe-int8",
    "wna16": "moe-wna16",
}

#: Scheme that reads checkpoints of a ``quant_method``, for the same hint.
KNOWN_QUANT_METHODS = {
    "fp8": "fp8",
    "mxfp8": "fp8",
    "w8a8_fp8": "fp8",
    "w8a8_int8": "int8",
    "mxfp4": "mxfp4",
    "gptq": "wna16",
    "awq": "wna16",
    "auto-round": "wna16",
    "intel/auto-round": "wna16",
}


def install_hint(scheme: str) -> str:
    """Return the pip command that installs a known scheme.

    Args:
        scheme: Name of the scheme.

    Returns:
        The command, or an empty string for an unknown scheme.
    """
    package = KNOWN_SCHEMES.get(scheme)
    return how_to_install(package) if package else ""


def how_to_add(scheme: str) -> str:
    """Return the text that follows "is not installed" in an error.

    Args:
        scheme: Name of the scheme.

    Returns:
        The install command, or that the package is installed but has no kernels yet; empty for an unknown scheme.
    """
    package = KNOWN_SCHEMES.get(scheme)
    if package is None:
        return ""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"; add it with: {install_hint(scheme)}"
    command = how_to_install(package, upgrade=True)
    return f" ({package} {version} is, but brings no kernels yet); a newer one may: {command}"


class Registry:
    """The plug-ins of one set of entry points; :func:`registry` is that of this installation.

    Results are published once and never change. No lock is held while plug-in code runs, because imports wait for each
    other. Two threads may therefore load the same plug-in; the first result is used by all.

    Args:
        entry_points: Function that returns the entry points of a group. A PluginFault among them represents a
            distribution whose entry points cannot be read.
    """

    def __init__(self, entry_points: Callable[[str], Sequence[EntryPoint | PluginFault]]) -> None:
        self._entry_points = entry_points
        self._lock = threading.Lock()
        self._found: dict[tuple[str, str], Any] = {}
        #: every fault, and whether a warning about it was issued
        self._faults: dict[PluginFault, bool] = {}

    def scheme_names(self) -> tuple[str, ...]:
        """Return the names of the installed schemes, including broken ones; loads none of them."""
        return tuple(sorted({point.name for point in self._group(SCHEME_GROUP)}))

    def scheme_packages(self) -> frozenset[str]:
        """Return the top-level packages that register schemes; loads none of them."""
        return frozenset(re.split("[.:]", point.value)[0] for point in self._group(SCHEME_GROUP))

    def schemes(self) -> tuple[SchemeSpec, ...]:
        """Load the installed schemes and return those that work, by name."""
        found = [self._scheme(name)[1] for name in self.scheme_names()]
        self._tell()
        return tuple(scheme for scheme in found if isinstance(scheme, SchemeSpec))

    def scheme(self, name: str) -> SchemeSpec:
        """Load the scheme of a name.

        Args:
            name: Name of the scheme.

        Returns:
            The scheme.

        Raises:
            SchemeNotInstalledError: It is not installed; the message has the pip command if it is known.
            ProtocolVersionError: It was written for another version of the interface.
            RegistryError: Its entry point cannot be loaded.
        """
        check_instance("name", name, str)
        if name not in self.scheme_names():
            known = ", ".join(self.scheme_names()) or "none"
            meant = did_you_mean(name, with_widths_of(name, {*self.scheme_names(), *KNOWN_SCHEMES} - {name}))
            raise SchemeNotInstalledError(
                f"scheme {name!r} is not installed (installed: {known}){how_to_add(name) or meant}"
            )
        return self._usable(self._scheme(name)[1])

    def oracle(self, name: str) -> Oracle:
        """Return the oracle of a scheme, including backends that other packages add.

        Args:
            name: Name of the scheme.

        Returns:
            The oracle.

        Raises:
            MoEError: As in :meth:`scheme`.
        """
        check_instance("name", name, str)
        found = self._once(("oracle", name), lambda: self._make_oracle(name))
        self._tell()
        return found

    def oracles(self) -> tuple[Oracle, ...]:
        """Return the oracles of the installed schemes that work, by scheme name."""
        return tuple(self.oracle(scheme.name) for scheme in self.schemes())

    def formats(self, name: str) -> tuple[type[CheckpointFormat], ...]:
        """Return the checkpoint formats of a scheme that work.

        Args:
            name: Name of the scheme.

        Returns:
            The scheme's own formats, then those that other packages add.

        Raises:
            MoEError: As in :meth:`scheme`.
        """
        check_instance("name", name, str)
        found = tuple(self._formats_of(name))
        self._tell()
        return found

    def format_origin(self, name: str, kind: type[CheckpointFormat]) -> str:
        """Return the distribution that provides a format.

        Args:
            name: Name of the scheme.
            kind: One of :meth:`formats`.

        Returns:
            Name of the distribution.
        """
        return owner(self._formats_of(name)[kind])

    def online_names(self) -> tuple[str, ...]:
        """Return the names of all online quantizations of 16-bit experts; loads the schemes."""
        found = self._online()
        self._tell()
        return tuple(sorted(name for name, online in found.items() if not isinstance(online, PluginFault)))

    def online(self, quantization: str | OnlineQuantization) -> OnlineQuantization:
        """Return the online quantization of a name.

        Args:
            quantization: A name, or an OnlineQuantization, which is returned as it is.

        Returns:
            The online quantization.

        Raises:
            ConfigError: The name is unknown.
            RegistryError: It does not work, or two schemes use the name.
        """
        from moe_core.kernels.ops.online import OnlineQuantization

        if isinstance(quantization, OnlineQuantization):
            return quantization
        if not isinstance(quantization, str):
            raise ConfigError(f"quantize is {quantization!r}, expected a name: {', '.join(self.online_names())}")
        found = self._online().get(quantization)
        if found is None:
            known = ", ".join(self.online_names()) or f"none; a scheme brings them, e.g. {install_hint('fp8')}"
            meant = did_you_mean(quantization, with_widths_of(quantization, self.online_names()))
            raise ConfigError(f"quantize={quantization!r} is unknown{meant}; installed: {known}")
        return self._usable(found)

    def faults(self) -> tuple[PluginFault, ...]:
        """Return the faults found so far; loads the backends of requested oracles."""
        with self._lock:
            known = tuple(self._faults)
            oracles = [found for (what, _), found in self._found.items() if what == "oracle"]
        return tuple(dict.fromkeys((*known, *(fault for oracle in oracles for fault in oracle.faults()))))

    def leave_out(self, fault: PluginFault) -> None:
        """Record a fault, with a PluginWarning the first time.

        Args:
            fault: The fault.
        """
        self._record([fault])
        self._tell()

    def _record(self, faults: Iterable[PluginFault]) -> None:
        with self._lock:
            for fault in faults:
                self._faults.setdefault(fault, False)

    def _tell(self) -> None:
        """Warn about recorded faults; not called where an error already reports the fault."""
        with self._lock:
            new = [fault for fault, told in self._faults.items() if not told]
            self._faults.update(dict.fromkeys(new, True))
        warn_of(new)

    def _usable(self, found: V | PluginFault) -> V:
        if isinstance(found, PluginFault):
            raise found.error()
        self._tell()
        return found

    def _once(self, key: tuple[str, str], make: Callable[[], tuple[V, Iterable[PluginFault]]]) -> V:
        """Keep the first value that any thread makes for ``key``; record only that value's faults."""
        if key not in self._found:
            value, faults = make()
            with self._lock:
                first = self._found.setdefault(key, value) is value
            if first:
                self._record(faults)
        kept: V = self._found[key]
        return kept

    def _group(self, group: str) -> tuple[EntryPoint, ...]:
        return self._once(
            ("group", group), lambda: split(self._placed(group, point) for point in self._entry_points(group))
        )

    def _placed(self, group: str, point: EntryPoint | PluginFault) -> EntryPoint | PluginFault:
        """Return ``point``, or a fault if its name could never be looked up."""
        kind = _ADDED.get(group)
        if kind is None or isinstance(point, PluginFault):
            return point
        scheme, _, name = point.name.partition(".")
        known = {*self.scheme_names(), *KNOWN_SCHEMES}
        # A name with one dot may be for a scheme that is not installed yet.
        if scheme and name and ("." not in name or scheme in known):
            return point
        installed = ", ".join(self.scheme_names()) or "none"
        what = f"; unknown scheme {scheme!r} (installed: {installed})" if name else ""
        reason = f"its entry point is named {point.name!r}, expected <scheme>.<{kind}>{what}"
        return PluginFault(kind, point.name, owner(point), reason)

    def _scheme(self, name: str) -> tuple[EntryPoint, SchemeSpec | PluginFault]:
        """The entry point of an installed scheme, and what it refers to."""

        def make() -> tuple[tuple[EntryPoint, SchemeSpec | PluginFault], tuple[PluginFault, ...]]:
            points = [point for point in self._group(SCHEME_GROUP) if point.name == name]
            check = functools.partial(_checked_scheme, name)
            found = load_named("scheme", points, check, KNOWN_SCHEMES.get(name))
            return found[0], split(one for _, one in found)[1]

        return self._once(("scheme", name), make)

    def _added(self, group: str, scheme: str, check: Callable[[object], V]) -> list[tuple[EntryPoint, V | PluginFault]]:
        """What other packages add to a scheme, in the order of names."""
        names: dict[str, list[EntryPoint]] = {}
        for point in self._group(group):
            if point.name.partition(".")[0] == scheme:
                names.setdefault(point.name, []).append(point)
        return [found for name in sorted(names) for found in load_named(_ADDED[group], names[name], check)]

    def _make_oracle(self, name: str) -> tuple[Oracle, list[PluginFault]]:
        """Make the oracle of a scheme with the backends that other packages add; also return the broken ones."""
        oracle, faults = Oracle(self.scheme(name)), []
        for point, found in self._added(BACKEND_GROUP, name, checked_experts):
            backend = point.name.partition(".")[2]
            fault = found if isinstance(found, PluginFault) else None
            if not isinstance(found, PluginFault):
                try:
                    oracle.add_backend(Backend(backend, (found,), owner(point), found.placement))
                except MoEError as error:
                    fault = PluginFault("backend", point.name, owner(point), error.message, error)
            if fault is not None:
                oracle.leave_out(backend, fault)
                faults.append(fault)
        return oracle, faults

    def _formats_of(self, name: str) -> dict[type[CheckpointFormat], EntryPoint]:
        """The working formats of a scheme, with the entry points that provide them."""

        def make() -> tuple[dict[type[CheckpointFormat], EntryPoint], list[PluginFault]]:
            found: dict[type[CheckpointFormat], EntryPoint] = {}
            faults: list[PluginFault] = []
            own = self.scheme(name).formats
            mine = self._scheme(name)[0]
            for kind in own:
                checked = attempt(functools.partial(_own_format, kind))
                if isinstance(checked, Raised):
                    what = kind if isinstance(kind, str) else getattr(kind, "__qualname__", type(kind).__qualname__)
                    faults.append(PluginFault("format", f"{name}.{what}", owner(mine), str(checked), checked.error))
                else:
                    found[checked] = mine
            for point, loaded in self._added(FORMAT_GROUP, name, functools.partial(_checked_format, added=True)):
                if isinstance(loaded, PluginFault):
                    faults.append(loaded)
                else:
                    found.setdefault(loaded, point)
            return found, faults

        return self._once(("formats", name), make)

    def _online(self) -> dict[str, OnlineQuantization | PluginFault]:
        """All online quantizations by name; a fault in place of a broken one."""
        return self._once(("online", ""), self._make_online)

    def _make_online(self) -> tuple[dict[str, OnlineQuantization | PluginFault], list[PluginFault]]:
        from moe_core.kernels.ops.online import OnlineQuantization

        found: dict[str, OnlineQuantization | PluginFault] = {}
        faults = []
        # On a name clash the scheme of this project keeps the name.
        for scheme in sorted(self.schemes(), key=lambda scheme: scheme.name not in KNOWN_SCHEMES):
            for item in scheme.online:
                online: object = item
                name = online.name if isinstance(online, OnlineQuantization) else ""
                other = found.get(name)
                if not isinstance(online, OnlineQuantization):
                    what = f"it registers a {type(online).__name__}, expected a moe_core.OnlineQuantization"
                elif online.scheme != scheme.name:
                    what = f"it makes weights of the scheme {online.scheme!r}, and {scheme.name!r} registers it"
                elif other is not None:
                    theirs = other.scheme if isinstance(other, OnlineQuantization) else "another scheme"
                    what = f"the name is taken by {theirs} too; uninstall one of them"
                else:
                    found[name] = online
                    continue
                fault = PluginFault("online quantization", name, owner(self._scheme(scheme.name)[0]), what)
                faults.append(fault)
                if not (isinstance(other, OnlineQuantization) and other.scheme in KNOWN_SCHEMES):
                    found[name] = fault
        return found, faults


def _checked_scheme(name: str, found: object) -> SchemeSpec:
    if not isinstance(found, SchemeSpec):
        raise RegistryError(f"is a {type(found).__name__}, expected a moe_core.SchemeSpec")
    check_api("interface_api", found.interface_api)
    check_api("format_api", found.format_api, required=bool(found.formats))
    check_api("kernel_api", found.kernel_api, required=False)
    if "." in name:
        raise RegistryError(
            f"is named {name!r}, expected a name without dots, since backends are named <scheme>.<name>"
        )
    if found.name != name:
        raise RegistryError(f"is the scheme {found.name!r}, its entry point is named {name!r}")
    for name in ("order", "reason_against"):
        value = getattr(found, name)
        if value is not None and not callable(value):
            raise RegistryError(f"has {name} of type {type(value).__name__}, expected a function")
    for name, item in _TUPLES.items():
        rows = getattr(found, name)
        if not isinstance(rows, tuple):
            raise RegistryError(f"has {name} of type {type(rows).__name__}, expected a tuple")
        if not all(isinstance(row, item) for row in rows):
            raise RegistryError(f"has {name} = {rows!r}, expected items of type {item.__name__}")
    return found


def _own_format(kind: object) -> type[CheckpointFormat]:
    """Check a scheme's own format, given as a class or "module:Class"."""
    return _checked_format(imported(kind) if isinstance(kind, str) else kind)


def _checked_format(found: object, *, added: bool = False) -> type[CheckpointFormat]:
    """Check a format class.

    Args:
        found: Object to check.
        added: Whether another package adds it; for a scheme's own formats the scheme's API version counts.
    """
    from moe_core.interface.checkpoint_format import CheckpointFormat

    if not derives(found, CheckpointFormat):
        raise RegistryError("is not a CheckpointFormat class")
    kind = cast("type[CheckpointFormat]", found)
    if added:
        check_api("format_api", getattr(kind, "format_api", None))
    if inspect.isabstract(kind):
        raise RegistryError(f"does not define {', '.join(sorted(kind.__abstractmethods__))}")
    if not isinstance(getattr(kind, "name", None), str):
        raise RegistryError("has no name")
    if not isinstance(kind.quant_methods, tuple):
        raise RegistryError(f"has quant_methods of type {type(kind.quant_methods).__name__}, expected a tuple")
    return kind


@functools.cache
def registry() -> Registry:
    """Return the registry of this installation."""
    return Registry(installed)


# Create it during the import of this module, which only one thread executes.
registry()


def oracle(name: str) -> Oracle:
    """Return the oracle of an installed scheme, e.g. ``oracle("fp8")``.

    Args:
        name: Name of the scheme.

    Returns:
        The oracle.

    Raises:
        MoEError: As in :meth:`Registry.scheme`.
    """
    return registry().oracle(name)
