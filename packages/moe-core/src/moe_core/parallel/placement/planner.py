"""Plan balanced placements from measured loads: which experts to replicate, and where.

Replicas are assigned one by one to the expert with the largest load per replica. They go to ranks by longest processing
time first: the largest replica to the least loaded rank that has a free slot and no replica of that expert. Then
experts of the most loaded rank are exchanged with those of other ranks as long as this helps. If ranks are still
unequal, as in small layers, other choices of replicas are tried. Everything is deterministic: ties go to the smaller id
or rank.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_core.errors import ConfigError, check_instance
from moe_core.parallel.placement.placement import ExpertPlacement
from moe_core.spec.config import whole_number

#: Allowed excess of the largest rank load over the best one found, if fewer experts move in return.
TOLERANCE = 0.05
#: Budget for trying other replicas: tries times slots times ranks.
EFFORT = 10_000


@dataclass(frozen=True)
class PlacementPlan:
    """A placement, and the rank loads that it results in.

    Attributes:
        placement: The placement.
        loads: Load of each rank, in the unit of the counts.
        moved: Number of slots whose expert changes.
    """

    placement: ExpertPlacement
    loads: tuple[float, ...]
    moved: int

    @property
    def balance(self) -> float:
        """Mean over maximum of the rank loads: 1 if all are equal, and if there is no load."""
        most = max(self.loads)
        return sum(self.loads) / len(self.loads) / most if most else 1.0


def rank_loads(placement: ExpertPlacement, counts: Sequence[float] | Tensor) -> tuple[float, ...]:
    """Compute the load of each rank; replicas share the load of an expert evenly.

    Args:
        placement: The placement.
        counts: Load of each expert, ``[E]``.

    Returns:
        Load of each rank.

    Raises:
        ConfigError: The counts do not fit the placement.
    """
    check_instance("placement", placement, ExpertPlacement)
    loads = _loads(counts)
    if len(loads) != placement.num_experts:
        raise ConfigError(
            f"counts has {len(loads)} values, expected one for each of the {placement.num_experts} experts"
        )
    shares = [load / len(places) for load, places in zip(loads, placement.replicas, strict=True)]
    return tuple(math.fsum(shares[expert] for expert in held) for held in placement.ranks)


def plan_placement(
    counts: Sequence[float] | Tensor,
    ep_size: int,
    *,
    slots: int | Sequence[int] | None = None,
    current: ExpertPlacement | None = None,
    tolerance: float = TOLERANCE,
) -> PlacementPlan:
    """Plan a placement that balances the load over ranks.

    Args:
        counts: How often each expert was chosen, ``[E]``.
        ep_size: Number of expert-parallel ranks.
        slots: Number of experts on every rank, or on each. Slots beyond E in total hold replicas. Default: as in
            ``current``, otherwise the fewest that hold all experts.
        current: Placement in use. Experts stay where they are, as long as the largest rank load exceeds that of a fresh
            plan by at most ``tolerance``.
        tolerance: Relative excess of the largest rank load.

    Returns:
        The plan.

    Raises:
        ConfigError: The loads are not finite numbers of at least 0, or the slots cannot hold every expert, or exceed
            one replica of each per rank.
    """
    check_instance("current", current, ExpertPlacement, type(None))
    check_instance("tolerance", tolerance, int, float)
    if not 0 <= tolerance < math.inf:
        raise ConfigError(f"tolerance is {tolerance!r}, expected a finite number of 0 or more")
    loads = _loads(counts)
    rooms = _rooms(len(loads), whole_number("ep_size", ep_size), slots, current)
    replicas, fresh = _balanced(loads, rooms)
    if current is None:
        return _plan(loads, fresh.ranks, None)
    enough = (1 + tolerance) * max(fresh.loads)
    if max(rank_loads(current, loads)) <= enough:
        return PlacementPlan(current, rank_loads(current, loads), 0)
    kept = _Packing(fresh.shares, rooms)
    kept.place(kept.keep(current, replicas))
    kept.exchange(enough)
    plans = [_plan(loads, _matched(fresh.ranks, current), current)]
    if max(kept.loads) <= enough:
        plans.append(_plan(loads, kept.ranks, current))
    return min(plans, key=lambda plan: plan.moved)


def _loads(counts: Sequence[float] | Tensor) -> list[float]:
    check_instance("counts", counts, Tensor, Iterable)
    if isinstance(counts, Tensor) and (counts.is_meta or counts.dim() != 1):
        raise ConfigError(f"counts has shape {list(counts.shape)} on {counts.device}, expected values [E]")
    found = counts.tolist() if isinstance(counts, Tensor) else list(counts)
    if not found or not all(isinstance(load, int | float) and math.isfinite(load) and load >= 0 for load in found):
        raise ConfigError(f"counts must hold a finite number of at least 0 for each expert, got {str(found)[:100]}")
    return [float(load) for load in found]


def _rooms(
    experts: int, ep_size: int, slots: int | Sequence[int] | None, current: ExpertPlacement | None
) -> tuple[int, ...]:
    """Number of slots of each rank."""
    if current is not None:
        if (current.num_experts, current.ep_size) != (experts, ep_size):
            raise ConfigError(
                f"the current placement is of {current.num_experts} experts on {current.ep_size} ranks, expected "
                f"{experts} on {ep_size}"
            )
        here = tuple(map(len, current.ranks))
        slots = here if slots is None else slots
    if slots is None:
        rooms = tuple(len(held) for held in ExpertPlacement.contiguous(experts, ep_size).ranks)
    elif isinstance(slots, Sequence):
        rooms = tuple(whole_number("slots", count) for count in slots)
    else:
        rooms = (whole_number("slots", slots),) * ep_size
    if len(rooms) != ep_size:
        raise ConfigError(f"slots has {len(rooms)} numbers, expected one for each of {ep_size} ranks")
    if sum(rooms) < experts or max(rooms) > experts:
        raise ConfigError(
            f"{sum(rooms)} slots on {ep_size} ranks, at most {max(rooms)} on one, are "
            f"{'too few' if sum(rooms) < experts else 'too many'} for {experts} experts"
        )
    if max(rooms) - min(rooms) > 1:
        raise ConfigError(f"slots is {list(rooms)[:20]}, expected numbers that differ by 1 at most")
    if current is not None and rooms != tuple(map(len, current.ranks)):
        raise ConfigError(f"slots is {list(rooms)[:20]}, which differs from the current placement")
    return rooms


def _replicas(loads: Sequence[float], total: int, ep_size: int) -> list[int]:
    """Number of replicas of each expert that minimizes the largest load per replica."""
    counts = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    left = total - len(loads)
    while left:
        _, expert = heapq.heappop(heap)
        if counts[expert] == ep_size:
            continue
        counts[expert] += 1
        left -= 1
        heapq.heappush(heap, (-loads[expert] / counts[expert], expert))
    return counts


def _balanced(loads: Sequence[float], rooms: Sequence[int]) -> tuple[list[int], _Packing]:
    """Find the most balanced packing; return the replicas per expert, and the packing."""

    def pack(counts: Sequence[int]) -> _Packing:
        packing = _Packing([load / count for load, count in zip(loads, counts, strict=True)], rooms)
        packing.place(counts)
        packing.exchange(0.0)
        return packing

    counts = _replicas(loads, sum(rooms), len(rooms))
    best = pack(counts)
    tries = EFFORT // (sum(rooms) * len(rooms))
    ideal = sum(loads) / len(rooms)
    better = sum(rooms) > len(loads)
    while better and max(best.loads) > ideal * (1 + TOLERANCE):
        better = False
        # Move a replica from one expert to another: take from the smallest replicas first, give to the smallest load
        # first.
        fewer = sorted((e for e in range(len(loads)) if counts[e] > 1), key=lambda e: (best.shares[e], e))
        more = sorted((e for e in range(len(loads)) if counts[e] < len(rooms)), key=lambda e: (loads[e], e))
        for one, other in ((a, b) for a in fewer for b in more if a != b):
            if not tries:
                return counts, best
            tries -= 1
            changed = list(counts)
            changed[one] -= 1
            changed[other] += 1
            found = pack(changed)
            if max(found.loads) < max(best.loads) * (1 - 1e-9):
                counts, best, better = changed, found, True
                break
    return counts, best


class _Packing:
    """Assignment of replicas, each with a share of load, to ranks with a number of slots."""

    def __init__(self, shares: Sequence[float], rooms: Sequence[int]) -> None:
        self.shares = shares
        self.rooms = rooms
        self.ranks: list[list[int]] = [[] for _ in rooms]
        self.loads = [0.0] * len(rooms)

    def _add(self, rank: int, expert: int) -> None:
        self.ranks[rank].append(expert)
        self.loads[rank] += self.shares[expert]

    def _swap(self, rank: int, expert: int, other: int, instead: int) -> None:
        self.ranks[rank][self.ranks[rank].index(expert)] = instead
        self.ranks[other][self.ranks[other].index(instead)] = expert
        change = self.shares[expert] - self.shares[instead]
        self.loads[rank] -= change
        self.loads[other] += change

    def keep(self, current: ExpertPlacement, replicas: Sequence[int]) -> list[int]:
        """Keep current experts, at most ``replicas`` of each; return how many remain to be placed."""
        now = rank_loads(current, [share * count for share, count in zip(self.shares, replicas, strict=True)])
        for expert, places in enumerate(current.replicas):
            # Of excess replicas, drop those on the most loaded ranks.
            stay = sorted((rank for rank, _ in places), key=lambda rank: (now[rank], rank))[: replicas[expert]]
            for rank in stay:
                self._add(rank, expert)
        return [count - min(count, len(held)) for count, held in zip(replicas, current.replicas, strict=True)]

    def place(self, counts: Sequence[int]) -> None:
        """Put ``counts`` replicas of each expert into free slots, the largest load first."""
        for expert in sorted(range(len(counts)), key=lambda e: (-self.shares[e], e)):
            for _ in range(counts[expert]):
                free = [rank for rank, room in enumerate(self.rooms) if len(self.ranks[rank]) < room]
                fitting = [rank for rank in free if expert not in self.ranks[rank]]
                if fitting:
                    self._add(min(fitting, key=lambda rank: (self.loads[rank], rank)), expert)
                else:
                    self._make_room(free[0], expert)

    def _make_room(self, free: int, expert: int) -> None:
        """Place an expert when all ranks with a free slot already hold it.

        Another rank takes it and gives one of its experts to the free slot. Such a rank exists: slots differ by at most
        1, so a full rank without the expert has one that ``free`` lacks.
        """
        for rank in sorted(range(len(self.rooms)), key=lambda rank: (self.loads[rank], rank)):
            if expert in self.ranks[rank]:
                continue
            others = [other for other in self.ranks[rank] if other not in self.ranks[free]]
            if others:
                given = min(others, key=lambda other: (abs(self.shares[other] - self.shares[expert]), other))
                self.ranks[rank][self.ranks[rank].index(given)] = expert
                self.loads[rank] += self.shares[expert] - self.shares[given]
                self._add(free, given)
                return
        raise ConfigError(f"no rank has a free slot for another replica of expert {expert}")

    def exchange(self, enough: float) -> None:
        """Swap experts of the most loaded rank until it has at most ``enough``, or no swap helps."""
        for _ in range(4 * sum(self.rooms)):
            most = max(self.loads)
            rank = self.loads.index(most)
            if most <= enough:
                return
            best: tuple[float, int, int, int] | None = None
            for other, load in enumerate(self.loads):
                found = None if other == rank else self._best_swap(rank, other)
                if found is not None:
                    change, expert, instead = found
                    peak = max(most - change, load + change)
                    if peak < most * (1 - 1e-9) and (best is None or peak < best[0]):
                        best = (peak, expert, other, instead)
            if best is None:
                return
            self._swap(rank, *best[1:])

    def _best_swap(self, rank: int, other: int) -> tuple[float, int, int] | None:
        """Find the swap that comes closest to halving the load difference of two ranks.

        Returns:
            (load that leaves ``rank``, its expert, the expert of ``other`` in exchange), or None.
        """
        wanted = (self.loads[rank] - self.loads[other]) / 2
        mine = [expert for expert in self.ranks[rank] if expert not in self.ranks[other]]
        theirs = sorted((self.shares[e], e) for e in self.ranks[other] if e not in self.ranks[rank])
        best: tuple[float, float, int, int] | None = None
        for expert in mine:
            at = bisect.bisect_left(theirs, (self.shares[expert] - wanted, -1))
            for share, instead in theirs[max(at - 1, 0) : at + 1]:
                change = self.shares[expert] - share
                option = (abs(change - wanted), change, expert, instead)
                if change > 0 and (best is None or option < best):
                    best = option
        return None if best is None else best[1:]


def _matched(ranks: Sequence[list[int]], current: ExpertPlacement) -> list[list[int]]:
    """Assign the same sets of experts to the ranks that already hold most of them."""
    pairs = sorted(
        (-len(set(held) & set(here)), old, new)
        for old, here in enumerate(current.ranks)
        for new, held in enumerate(ranks)
        if len(held) == len(here)
    )
    taken: dict[int, int] = {}
    for _, old, new in pairs:
        if old not in taken and new not in taken.values():
            taken[old] = new
    return [ranks[taken[old]] for old in range(len(ranks))]


def _plan(loads: Sequence[float], ranks: Sequence[Sequence[int]], current: ExpertPlacement | None) -> PlacementPlan:
    placement = ExpertPlacement(len(loads), tuple(tuple(sorted(held)) for held in ranks))
    if current is None:
        return PlacementPlan(placement, rank_loads(placement, loads), 0)
    placement = placement.aligned(current)
    moved = sum(
        new != old
        for held, here in zip(placement.ranks, current.ranks, strict=True)
        for new, old in zip(held, here, strict=True)
    )
    return PlacementPlan(placement, rank_loads(placement, loads), moved)
