"""One entry of a scheme's backend table: a backend and its experts classes."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from typing import cast

from moe_core.errors import RegistryError
from moe_core.interface.backend_order import Placement
from moe_core.interface.claims import Claims
from moe_core.interface.experts import FusedMoEExperts, FusedMoEExpertsModular, FusedMoEExpertsMonolithic
from moe_core.interface.versions import check_api
from moe_core.plugins.entry_points import imported
from moe_core.plugins.faults import PluginFault, Raised, attempt, derives, split, warn_of


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
    #: Experts classes and faults, once they are loaded. The first result that any thread puts here is kept.
    _loaded: dict[None, tuple[tuple[type[FusedMoEExperts], ...], tuple[PluginFault, ...]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def load(self) -> tuple[type[FusedMoEExperts], ...]:
        """Import the experts classes.

        A class that cannot be loaded is disabled, with a PluginWarning the first time.

        Returns:
            The classes that work.
        """
        return self._once()[0]

    @property
    def faults(self) -> tuple[PluginFault, ...]:
        """Faults of the classes that :meth:`load` disables."""
        return self._once()[1]

    def _once(self) -> tuple[tuple[type[FusedMoEExperts], ...], tuple[PluginFault, ...]]:
        if None not in self._loaded:
            # Several threads may load. A lock held during an import could wait for an import that waits for the lock.
            loaded = split(map(self._load, self.classes))
            if self._loaded.setdefault(None, loaded) is loaded:
                warn_of(loaded[1])
        return self._loaded[None]

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


def reason_against_class(found: object) -> str | None:
    """Explain why ``found`` cannot be a backend.

    Args:
        found: The object that a plug-in provides.

    Returns:
        The reason, or None if it is a complete experts class.
    """
    if not derives(found, FusedMoEExperts):
        return "is not a FusedMoEExperts class"
    if not derives(found, FusedMoEExpertsModular) and not derives(found, FusedMoEExpertsMonolithic):
        return "is neither a FusedMoEExpertsModular nor a FusedMoEExpertsMonolithic"
    experts = cast("type[FusedMoEExperts]", found)
    if inspect.isabstract(experts):
        return f"does not define {', '.join(sorted(experts.__abstractmethods__))}"
    claims = getattr(experts, "claims", None)
    if not isinstance(claims, Claims):
        return f"has claims that are {_kind(claims)}, expected moe_core.Claims"
    if not isinstance(experts.placement, Placement):
        return f"has a placement of type {_kind(experts.placement)}, expected moe_core.Placement"
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
