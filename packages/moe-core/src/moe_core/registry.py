"""Finding schemes, backends and formats through entry points.

Groups:

- ``moe_core.schemes``: ``fp8 = "moe_fp8.scheme:SCHEME"``, a :class:`Scheme`
- ``moe_core.backends``: ``fp8.mine = "my_package:MyExperts"``, an experts class for the scheme before the dot, named
  by what follows it.  The class states ``protocol_version = 1``, the version it was written for.
- ``moe_core.formats``: ``fp8.mine = "my_package:MyFormat"``, a checkpoint format of that scheme

Entry points are collected once per process and loaded on first use.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moe_core.errors import (
    ConfigError,
    ProtocolVersionError,
    RegistryError,
    SchemeNotInstalledError,
    did_you_mean,
)
from moe_core.experts import PROTOCOL_VERSION, FusedMoEExperts
from moe_core.install import how_to_install
from moe_core.oracle import Backend, Oracle

if TYPE_CHECKING:
    from moe_core.checkpoint.format import CheckpointFormat
    from moe_core.online import OnlineQuantization

SCHEME_GROUP = "moe_core.schemes"
BACKEND_GROUP = "moe_core.backends"
FORMAT_GROUP = "moe_core.formats"

#: Packages that bring a scheme, for the hint in an error only: what is installed is never looked up here.
KNOWN_SCHEMES = {
    "fp8": "moe-fp8",
    "mxfp4": "moe-mxfp4",
    "int8": "moe-int8",
    "wna16": "moe-wna16",
}

#: Which scheme reads checkpoints of a ``quant_method``, for the same hint.
KNOWN_QUANT_METHODS = {
    "fp8": "fp8",
    "mxfp8": "fp8",
    "mxfp4": "mxfp4",
    "gptq": "wna16",
    "awq": "wna16",
    "auto-round": "wna16",
    "intel/auto-round": "wna16",
}


@dataclass(frozen=True)
class Scheme:
    """What a scheme package registers.

    ``protocol``: the version of this interface it was built for, written as a literal;
    ``oracle``: makes its oracle; ``formats``: its checkpoint formats, most specific first;
    ``quant_methods`` that its formats may read; ``quickstart``: writes a small checkpoint into a folder;
    ``online``: what it makes of 16-bit experts at load.
    """

    name: str
    protocol: int
    oracle: Callable[[], Oracle]
    formats: tuple[type[CheckpointFormat], ...] = ()
    quant_methods: tuple[str, ...] = ()
    quickstart: Callable[[Any], None] | None = field(default=None, compare=False)
    online: tuple[OnlineQuantization, ...] = ()


def install_hint(scheme: str) -> str:
    """The pip command that adds a known scheme, or an empty text."""
    package = KNOWN_SCHEMES.get(scheme)
    return how_to_install(package) if package else ""


def how_to_add(scheme: str) -> str:
    """What to say after "is not installed": the command, or that the package is there and has no kernels yet."""
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
    """The plug-ins of one set of entry points; :func:`registry` is that of this installation."""

    def __init__(self, entry_points: Callable[[str], list[importlib.metadata.EntryPoint]]) -> None:
        self._entry_points = entry_points
        self._schemes: dict[str, Scheme] = {}
        self._oracles: dict[str, Oracle] = {}

    @functools.cached_property
    def _scheme_points(self) -> dict[str, importlib.metadata.EntryPoint]:
        points: dict[str, importlib.metadata.EntryPoint] = {}
        for point in self._entry_points(SCHEME_GROUP):
            known = points.setdefault(point.name, point)
            if known.value != point.value or _owner(known) != _owner(point):
                raise RegistryError(
                    f"scheme {point.name!r} is registered twice: by {_owner(known)} ({known.value}) and by "
                    f"{_owner(point)} ({point.value}); uninstall one of them"
                )
        return points

    def scheme_names(self) -> tuple[str, ...]:
        """Names of the installed schemes; loads none of them."""
        return tuple(sorted(self._scheme_points))

    def scheme(self, name: str) -> Scheme:
        """The scheme of that name, loaded.

        Raises SchemeNotInstalledError (with the pip command where it is known), ProtocolVersionError,
        RegistryError for an entry point that can't be loaded.
        """
        if name not in self._schemes:
            point = self._scheme_points.get(name)
            if point is None:
                installed = ", ".join(self.scheme_names()) or "none"
                meant = did_you_mean(name, {*self.scheme_names(), *KNOWN_SCHEMES} - {name})
                raise SchemeNotInstalledError(
                    f"scheme {name!r} is not installed (installed: {installed}){how_to_add(name) or meant}"
                )
            loaded = _load(point)
            if not isinstance(loaded, Scheme):
                raise RegistryError(
                    f"entry point {point.name} = {point.value} of {_owner(point)} is a {type(loaded).__name__}, "
                    "expected a moe_core.Scheme"
                )
            _check_protocol(f"scheme {name!r} of {_owner(point)}", loaded.protocol)
            self._schemes[name] = loaded
        return self._schemes[name]

    def oracle(self, name: str) -> Oracle:
        """The oracle of a scheme, with the backends that other packages add to it."""
        if name not in self._oracles:
            oracle = self.scheme(name).oracle()
            for point in self._entry_points(BACKEND_GROUP):
                scheme, _, backend = point.name.partition(".")
                if scheme == name:
                    oracle.add_backend(self._backend(point, backend))
            self._oracles[name] = oracle
        return self._oracles[name]

    def formats(self, name: str) -> tuple[type[CheckpointFormat], ...]:
        """Checkpoint formats of a scheme: its own, then those that other packages add."""
        added = [_load(p) for p in self._entry_points(FORMAT_GROUP) if p.name.partition(".")[0] == name]
        return (*self.scheme(name).formats, *added)

    def online_names(self) -> tuple[str, ...]:
        """Names of everything that the installed schemes make of 16-bit experts; loads the schemes."""
        return tuple(sorted(self._online))

    def online(self, quantization: str | OnlineQuantization) -> OnlineQuantization:
        """The online quantisation of that name, or the one given.

        Raises ConfigError for an unknown name, RegistryError where two schemes use it.
        """
        if not isinstance(quantization, str):
            return quantization
        found = self._online.get(quantization)
        if found is None:
            known = ", ".join(self.online_names()) or f"none; a scheme brings them, e.g. {install_hint('fp8')}"
            meant = did_you_mean(quantization, self.online_names())
            raise ConfigError(f"quantize={quantization!r} is unknown{meant}; installed: {known}")
        return found

    @functools.cached_property
    def _online(self) -> dict[str, OnlineQuantization]:
        found: dict[str, OnlineQuantization] = {}
        for scheme in self.scheme_names():
            for online in self.scheme(scheme).online:
                if online.scheme != scheme:
                    raise RegistryError(f"scheme {scheme!r} registers {online.name!r} for the scheme {online.scheme!r}")
                other = found.setdefault(online.name, online)
                if other is not online:
                    raise RegistryError(
                        f"the online quantisation {online.name!r} is registered twice: by the schemes {other.scheme!r} "
                        f"and {scheme!r}; uninstall one of them"
                    )
        return found

    @staticmethod
    def _backend(point: importlib.metadata.EntryPoint, name: str) -> Backend:
        if not name:
            raise RegistryError(
                f"backend entry point {point.name!r} of {_owner(point)} is not named <scheme>.<backend>"
            )
        loaded = _load(point)
        if not (isinstance(loaded, type) and issubclass(loaded, FusedMoEExperts)):
            raise RegistryError(f"backend {point.name} = {point.value} of {_owner(point)} is no FusedMoEExperts class")
        _check_protocol(f"backend {point.name!r} of {_owner(point)}", getattr(loaded, "protocol_version", None))
        return Backend(name, (loaded,), origin=_owner(point))


def _owner(point: importlib.metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown distribution"


def _load(point: importlib.metadata.EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise RegistryError(
            f"entry point {point.name} = {point.value} of {_owner(point)} cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def _check_protocol(what: str, protocol: object) -> None:
    if protocol != PROTOCOL_VERSION:
        found = "states no protocol_version" if protocol is None else f"was built for plug-in protocol {protocol}"
        raise ProtocolVersionError(
            f"{what} {found}; this moe-core speaks protocol {PROTOCOL_VERSION}: install versions that match"
        )


@functools.cache
def registry() -> Registry:
    """The registry of this installation."""
    return Registry(lambda group: list(importlib.metadata.entry_points(group=group)))


def oracle(name: str) -> Oracle:
    """The oracle of an installed scheme, e.g. ``oracle("fp8")``."""
    return registry().oracle(name)
