"""One entry of a scheme's backend table: a backend and its experts classes."""

from __future__ import annotations

import functools
import inspect
import threading
from dataclasses import dataclass, field
from typing import cast

from moe_core.errors import RegistryError
from moe_core.interface.backend_order import Placement
from moe_core.interface.claims import Claims
from moe_core.interface.experts import FusedMoEExperts, FusedMoEExpertsModular, FusedMoEExpertsMonolithic
from moe_core.interface.versions import check_api
from moe_core.plugins.entry_points import imported
from moe_core.plugins.faults import PluginFault, Raised, attempt, derives, warn_of

#: Guards publishing a result. Never held during an import, because an import can wait for other imports.
_PUBLISHING = threading.Lock()


@dataclass(frozen=True)
class Backend:
    """Name of a backend and its experts classes.

    One backend can have several classes, e.g. a dedicated one for the batched format.

    Attributes:
        name: Name of the backend.
        classes: Classes, or "module:Class" strings that are imported when the table is first read. A module with
            experts must be importable without Triton or a kernel library.
        origin: Distribution that provides the backend.
        placement: Position in the order of preference, for a backend that another package adds to a scheme.
        aliases: Other names that select this backend. If one is also the name of another backend, both are
            candidates.
    """

    name: str
    classes: tuple[type[FusedMoEExperts] | str, ...]
    origin: str = ""
    placement: Placement = field(default_factory=Placement)
    aliases: tuple[str, ...] = ()
    _loaded: list[_Loaded] = field(default_factory=list, compare=False, repr=False)

    def load(self) -> tuple[type[FusedMoEExperts], ...]:
        """Import the experts classes.

        A class that cannot be loaded is disabled, with a PluginWarning the first time.

        Returns:
            The classes that work.
        """
        return self._once().classes

    @property
    def faults(self) -> tuple[PluginFault, ...]:
        """Faults of the classes that :meth:`load` disables."""
        return self._once().faults

    def _once(self) -> _Loaded:
        """Load, possibly in several threads, and publish one result."""
        if not self._loaded:
            found = [self._load(item) for item in self.classes]
            loaded = _Loaded(
                tuple(item for item in found if not isinstance(item, PluginFault)),
                tuple(item for item in found if isinstance(item, PluginFault)),
            )
            with _PUBLISHING:
                first = not self._loaded
                if first:
                    self._loaded.append(loaded)
            if first:
                warn_of(loaded.faults)
        return self._loaded[0]

    def _load(self, item: type[FusedMoEExperts] | str) -> type[FusedMoEExperts] | PluginFault:
        found = attempt(functools.partial(imported, item)) if isinstance(item, str) else item
        text = item if isinstance(item, str) else ""
        if isinstance(found, Raised):
            return self._fault(f"{text} cannot be loaded: {found}", found.error)
        reason = attempt(lambda: reason_against_class(found))
        if isinstance(reason, Raised):
            return self._fault(f"{text} cannot be examined: {reason}", reason.error)
        return cast("type[FusedMoEExperts]", found) if reason is None else self._fault(f"{text} {reason}".strip())

    def _fault(self, reason: str, cause: BaseException | None = None) -> PluginFault:
        return PluginFault("backend", self.name, self.origin or "an unknown distribution", reason, cause)


@dataclass(frozen=True)
class _Loaded:
    classes: tuple[type[FusedMoEExperts], ...]
    faults: tuple[PluginFault, ...]


def reason_against_class(found: object) -> str | None:
    """Explain why ``found`` cannot be a backend.

    Args:
        found: The object that a plug-in provides.

    Returns:
        The reason, or None if it is a complete experts class.
    """
    if not derives(found, FusedMoEExperts):
        return "is no FusedMoEExperts class"
    if not derives(found, FusedMoEExpertsModular) and not derives(found, FusedMoEExpertsMonolithic):
        return "is neither a FusedMoEExpertsModular nor a FusedMoEExpertsMonolithic"
    experts = cast("type[FusedMoEExperts]", found)
    if inspect.isabstract(experts):
        return f"does not define {', '.join(sorted(experts.__abstractmethods__))}"
    claims = getattr(experts, "claims", None)
    if not isinstance(claims, Claims):
        return f"has claims that are {_kind(claims)}, expected moe_core.Claims"
    if not isinstance(experts.placement, Placement):
        return f"has a placement that is {_kind(experts.placement)}, expected moe_core.Placement"
    return None


def checked_experts(found: object) -> type[FusedMoEExperts]:
    """Return ``found`` if a package may register it as a backend.

    Args:
        found: The object that a plug-in provides.

    Returns:
        The experts class.

    Raises:
        RegistryError: ``found`` is not a complete experts class.
        ProtocolVersionError: The class was written for another version of the interface.
    """
    reason = reason_against_class(found)
    if reason is not None:
        raise RegistryError(reason)
    experts: type[FusedMoEExperts] = found  # type: ignore[assignment]
    check_api("interface_api", getattr(experts, "interface_api", None))
    check_api("kernel_api", getattr(experts, "kernel_api", None), required=False)
    return experts


def _kind(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
