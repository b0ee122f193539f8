"""Versions of the declared API that plug-ins state.

Plug-ins state the versions that they were written for, as literals. A plug-in is compatible if the major numbers are
equal and its minor number is not greater. The major number changes if plug-ins would break, the minor number if names
are added.
"""

from __future__ import annotations

from typing import NamedTuple

from moe_core.errors import ProtocolVersionError


class ApiVersion(NamedTuple):
    """Version of one part of the declared API.

    Attributes:
        major: Changes if plug-ins would break.
        minor: Changes if names are added.
    """

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


#: Experts, prepare/finalize, schemes and commands: ``moe_core`` and
#: ``moe_core.api.{commands,engines,libraries,models}``.
INTERFACE_API = ApiVersion(1, 0)
#: Checkpoint formats: ``moe_core.api.formats``.
FORMAT_API = ApiVersion(1, 0)
#: Base classes of experts and device functions: ``moe_core.api.{experts,kernels,sm90}``.
KERNEL_API = ApiVersion(1, 0)

_OFFERED = {"interface_api": INTERFACE_API, "format_api": FORMAT_API, "kernel_api": KERNEL_API}


def check_api(name: str, stated: object, *, required: bool = True) -> None:
    """Check the version of one part of the API that a plug-in states.

    Args:
        name: "interface_api", "format_api" or "kernel_api".
        stated: ``(major, minor)``; None where the plug-in states nothing.
        required: whether a plug-in must state it.

    Raises:
        ProtocolVersionError: The version is missing, is not a pair of integers, or does not fit this moe-core.
    """
    offered = _OFFERED[name]
    if stated is None and not required:
        return
    if stated is None:
        raise ProtocolVersionError(f"states no {name}; this moe-core offers {tuple(offered)}")
    if not isinstance(stated, tuple) or len(stated) != 2 or not all(type(number) is int for number in stated):
        raise ProtocolVersionError(f"states {name} = {stated!r}, expected a pair of integers like {tuple(offered)}")
    version = ApiVersion(*stated)
    if version.major != offered.major or version.minor > offered.minor:
        raise ProtocolVersionError(
            f"was built for {name} {version}; this moe-core offers {offered}: install versions that match"
        )
