"""Checks of the process groups and the placement passed by a caller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_core.errors import ConfigError
from moe_core.parallel.placement.placement import ExpertPlacement, check_placement

if TYPE_CHECKING:
    from moe_core.parallel.distributed.groups import ParallelGroups


def check_placed(groups: ParallelGroups | None, placement: ExpertPlacement | None) -> None:
    """Check that groups and placement are valid, and that a placement comes with its groups.

    Args:
        groups: Process groups of a layer's ranks, if any.
        placement: Placement of experts on these ranks, if any.

    Raises:
        ConfigError: An argument has the wrong type, or a placement is passed without groups.
    """
    if groups is not None:
        from moe_core.parallel.distributed.groups import ParallelGroups

        if not isinstance(groups, ParallelGroups):
            raise ConfigError(f"groups is {groups!r}, expected ParallelGroups, as ParallelGroups.create makes them")
    if placement is not None:
        check_placement(placement)
        if groups is None:
            raise ConfigError("placement= needs groups=: pass the groups of its ranks, too")
