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
from typing import TYPE_CHECKING, TypeVar, cast

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
from moe_core.plugins.entry_points import imported, installed, load, one_of, others_of, owner
from moe_core.plugins.faults import PluginFault, Raised, attempt, derives, warn_of
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

K = TypeVar("K")
V = TypeVar("V")

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
        self._groups: dict[str, tuple[EntryPoint, ...]] = {}
        self._schemes: dict[str, SchemeSpec | PluginFault] = {}
        self._oracles: dict[str, Oracle] = {}
        self._formats: dict[str, dict[type[CheckpointFormat], EntryPoint]] = {}
        self._onlines: dict[str, dict[str, OnlineQuantization | PluginFault]] = {}
        self._faults: dict[PluginFault, None] = {}
        self._untold: list[PluginFault] = []

    def scheme_names(self) -> tuple[str, ...]:
        """Return the names of the installed schemes, including broken ones; loads none of them."""
        return tuple(sorted({point.name for point in self._group(SCHEME_GROUP)}))

    def scheme_packages(self) -> frozenset[str]:
        """Return the top-level packages that register schemes; loads none of them."""
        return frozenset(re.split("[.:]", point.value)[0] for point in self._group(SCHEME_GROUP))

    def schemes(self) -> tuple[SchemeSpec, ...]:
        """Load the installed schemes and return those that work, by name."""
        found = tuple(map(self._scheme, self.scheme_names()))
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
        found = self._scheme(name)
        if found is None:
            known = ", ".join(self.scheme_names()) or "none"
            meant = did_you_mean(name, with_widths_of(name, {*self.scheme_names(), *KNOWN_SCHEMES} - {name}))
            raise SchemeNotInstalledError(
                f"scheme {name!r} is not installed (installed: {known}){how_to_add(name) or meant}"
            )
        return self._usable(found)

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
        if name not in self._oracles:
            oracle = Oracle(self.scheme(name))
            faults = _add_backends(oracle, self._added_backends(name))
            self._publish(self._oracles, name, oracle, faults)
        self._tell()
        return self._oracles[name]

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
        if name not in self.scheme_names():
            self.scheme(name)  # raises the error for a scheme that is not installed
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
            oracles = tuple(self._oracles.values())
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
            new = [fault for fault in dict.fromkeys(faults) if fault not in self._faults]
            self._faults.update(dict.fromkeys(new))
            self._untold += new

    def _tell(self) -> None:
        """Warn about recorded faults; not called where an error already reports the fault."""
        with self._lock:
            new, self._untold = self._untold, []
        warn_of(new)

    def _usable(self, found: V | PluginFault) -> V:
        if isinstance(found, PluginFault):
            raise found.error()
        self._tell()
        return found

    def _publish(self, store: dict[K, V], key: K, value: V, faults: Iterable[PluginFault] = ()) -> V:
        """Keep the first value that any thread has for ``key``; record only that value's faults."""
        with self._lock:
            first = key not in store
            kept = store.setdefault(key, value)
        if first:
            self._record(faults)
        return kept

    def _group(self, group: str) -> tuple[EntryPoint, ...]:
        if group in self._groups:
            return self._groups[group]
        found = [self._placed(group, point) for point in self._entry_points(group)]
        points = tuple(point for point in found if not isinstance(point, PluginFault))
        return self._publish(self._groups, group, points, (p for p in found if isinstance(p, PluginFault)))

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
        what = f"; {scheme!r} is no scheme (installed: {', '.join(self.scheme_names()) or 'none'})" if name else ""
        reason = f"its entry point is named {point.name!r}, expected <scheme>.<{kind}>{what}"
        return PluginFault(kind, point.name, owner(point), reason)

    def _scheme(self, name: str) -> SchemeSpec | PluginFault | None:
        if name in self._schemes:
            return self._schemes[name]
        points = [point for point in self._group(SCHEME_GROUP) if point.name == name]
        if not points:
            return None
        point = one_of("scheme", points, KNOWN_SCHEMES.get(name))
        if isinstance(point, list):
            return self._publish(self._schemes, name, point[0], point)
        found = load(point, "scheme", functools.partial(_checked_scheme, name))
        faults = others_of("scheme", points, point)
        if isinstance(found, PluginFault):
            faults.append(found)
        return self._publish(self._schemes, name, found, faults)

    def _point(self, name: str) -> EntryPoint:
        """The entry point of a loaded scheme."""
        points = [point for point in self._group(SCHEME_GROUP) if point.name == name]
        chosen = one_of("scheme", points, KNOWN_SCHEMES.get(name))
        return points[0] if isinstance(chosen, list) else chosen

    def _added(self, group: str, scheme: str) -> list[list[EntryPoint]]:
        """Entry points of other packages for a scheme, grouped by name, in the order of names."""
        names: dict[str, list[EntryPoint]] = {}
        for point in self._group(group):
            if point.name.partition(".")[0] == scheme:
                names.setdefault(point.name, []).append(point)
        return [names[name] for name in sorted(names)]

    def _added_backends(self, scheme: str) -> list[tuple[str, Backend | PluginFault]]:
        """Pairs of name and backend for every name; a fault in place of a broken backend."""
        found: list[tuple[str, Backend | PluginFault]] = []
        for points in self._added(BACKEND_GROUP, scheme):
            name = points[0].name.partition(".")[2]
            point = one_of("backend", points)
            if isinstance(point, list):
                found += [(name, fault) for fault in point]
                continue
            loaded = load(point, "backend", checked_experts)
            if isinstance(loaded, PluginFault):
                found.append((name, loaded))
            else:
                found.append((name, Backend(name, (loaded,), owner(point), loaded.placement)))
        return found

    def _formats_of(self, name: str) -> dict[type[CheckpointFormat], EntryPoint]:
        """The working formats of a scheme, with the entry points that provide them."""
        if name in self._formats:
            return self._formats[name]
        found: dict[type[CheckpointFormat], EntryPoint] = {}
        faults = []
        mine = self._point(name)
        for kind in self.scheme(name).formats:
            checked = attempt(functools.partial(_own_format, kind))
            if isinstance(checked, Raised):
                what = kind if isinstance(kind, str) else getattr(kind, "__qualname__", type(kind).__qualname__)
                faults.append(PluginFault("format", f"{name}.{what}", owner(mine), str(checked), checked.error))
            else:
                found[checked] = mine
        for points in self._added(FORMAT_GROUP, name):
            point = one_of("format", points)
            if isinstance(point, list):
                faults += point
                continue
            loaded = load(point, "format", functools.partial(_checked_format, added=True))
            if isinstance(loaded, PluginFault):
                faults.append(loaded)
            else:
                found.setdefault(loaded, point)
        return self._publish(self._formats, name, found, faults)

    def _online(self) -> dict[str, OnlineQuantization | PluginFault]:
        """All online quantizations by name; a fault in place of a broken one."""
        if "all" in self._onlines:
            return self._onlines["all"]
        from moe_core.kernels.ops.online import OnlineQuantization

        found: dict[str, OnlineQuantization | PluginFault] = {}
        faults = []
        # On a name clash the scheme of this project keeps the name.
        for scheme in sorted(self.schemes(), key=lambda scheme: scheme.name not in KNOWN_SCHEMES):
            for online in scheme.online:
                if not isinstance(online, OnlineQuantization):
                    what = f"it registers a {type(online).__name__}, expected a moe_core.OnlineQuantization"
                    faults.append(self._online_fault(scheme.name, "", what))
                    continue
                other = found.get(online.name)
                if online.scheme != scheme.name:
                    what = f"it makes weights of the scheme {online.scheme!r}, and {scheme.name!r} registers it"
                elif other is not None:
                    theirs = other.scheme if isinstance(other, OnlineQuantization) else "another scheme"
                    what = f"the name is taken by {theirs} too; uninstall one of them"
                else:
                    found[online.name] = online
                    continue
                faults.append(self._online_fault(scheme.name, online.name, what))
                if other is None or (isinstance(other, OnlineQuantization) and other.scheme not in KNOWN_SCHEMES):
                    found[online.name] = faults[-1]
        return self._publish(self._onlines, "all", found, faults)

    def _online_fault(self, scheme: str, name: str, reason: str) -> PluginFault:
        return PluginFault("online quantisation", name, owner(self._point(scheme)), reason)


def _add_backends(oracle: Oracle, added: Iterable[tuple[str, Backend | PluginFault]]) -> list[PluginFault]:
    """Add backends to the table of an oracle; return the faults of those left out."""
    faults = []
    for name, backend in added:
        if isinstance(backend, Backend):
            try:
                oracle.add_backend(backend)
                continue
            except MoEError as error:
                fault = PluginFault("backend", f"{oracle.scheme}.{name}", backend.origin, error.message, error)
        else:
            fault = backend
        oracle.leave_out(name, fault)
        faults.append(fault)
    return faults


def _checked_scheme(name: str, found: object) -> SchemeSpec:
    if not isinstance(found, SchemeSpec):
        raise RegistryError(f"is a {type(found).__name__}, expected a moe_core.SchemeSpec")
    check_api("interface_api", found.interface_api)
    check_api("format_api", found.format_api, required=bool(found.formats))
    check_api("kernel_api", found.kernel_api, required=False)
    if "." in name:
        raise RegistryError(f"is named {name!r}, expected a name without dots: others add <scheme>.<name> to it")
    if found.name != name:
        raise RegistryError(f"is the scheme {found.name!r}, its entry point is named {name!r}")
    for field_name in ("order", "reason_against"):
        value = getattr(found, field_name)
        if value is not None and not callable(value):
            raise RegistryError(f"has {field_name} that is a {type(value).__name__}, expected a function")
    for field_name in ("backends", "formats", "quant_methods", "online", "kinds"):
        value = getattr(found, field_name)
        if not isinstance(value, tuple):
            raise RegistryError(f"has {field_name} that are a {type(value).__name__}, expected a tuple")
    methods: tuple[object, ...] = found.quant_methods
    if not all(isinstance(method, str) for method in methods):
        raise RegistryError(f"has quant_methods that are no texts: {methods!r}")
    rows: tuple[object, ...] = found.backends
    if not all(isinstance(row, Backend) for row in rows):
        raise RegistryError(f"has backends that are {rows!r}, expected moe_core.Backend")
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
        raise RegistryError("is no CheckpointFormat class")
    kind = cast("type[CheckpointFormat]", found)
    if added:
        check_api("format_api", getattr(kind, "format_api", None))
    if inspect.isabstract(kind):
        raise RegistryError(f"does not define {', '.join(sorted(kind.__abstractmethods__))}")
    if not isinstance(getattr(kind, "name", None), str):
        raise RegistryError("has no name")
    if not isinstance(kind.quant_methods, tuple):
        raise RegistryError(f"has quant_methods that are a {type(kind.quant_methods).__name__}, expected a tuple")
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
