"""A row of an oracle's table: a backend and its experts classes."""

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

#: held while a result is put in its place, never while anything is imported: an import waits for other imports
_PUBLISHING = threading.Lock()


@dataclass(frozen=True)
class Backend:
    """The backend's name and its experts classes.

    Several classes serve one backend where e.g. the batched format has a class of its own.
    ``classes`` are classes, or "module:Class" that is imported when the table is first read; an
    experts module must import without Triton or a kernel library.  ``origin``: the distribution that brings it;
    ``placement``: where it stands, if it is added to a scheme's own; ``aliases``: further names by which it may be
    asked for, also names of other backends, which are asked too.
    """

    name: str
    classes: tuple[type[FusedMoEExperts] | str, ...]
    origin: str = ""
    placement: Placement = field(default_factory=Placement)
    aliases: tuple[str, ...] = ()
    _loaded: list[_Loaded] = field(default_factory=list, compare=False, repr=False)

    def load(self) -> tuple[type[FusedMoEExperts], ...]:
        """The classes; one that cannot be loaded is left out, with a PluginWarning the first time."""
        return self._once().classes

    @property
    def faults(self) -> tuple[PluginFault, ...]:
        """What :meth:`load` leaves out."""
        return self._once().faults

    def _once(self) -> _Loaded:
        """Loaded in any number of threads, published once."""
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
    """Why ``found`` cannot be taken into a table; None if it is an experts class that is complete."""
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
    """``found``, where a package may register it as a backend.

    Raises RegistryError for what is no complete experts class, ProtocolVersionError for one that was not written for
    this version of the interface.
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
