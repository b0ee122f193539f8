"""From one placement to another in steps, each of which is a placement, with few experts at a time."""

from __future__ import annotations

from collections import Counter

from moe_core.errors import check_instance
from moe_core.parallel.placement.placement import ExpertPlacement
from moe_core.spec.config import whole_number

#: (rank, local index)
Slot = tuple[int, int]


def placement_steps(
    current: ExpertPlacement, new: ExpertPlacement, max_staged: int | None = None
) -> tuple[ExpertPlacement, ...]:
    """Placements that lead from ``current`` to one with the experts of ``new`` on each rank; empty where it has them.

    At most ``max_staged`` slots of a rank get another expert in a step; None: all at once.  In every step every expert
    is somewhere, and what stays on a rank stays in its slot.  Pure: all ranks come to the same steps.
    Raises ConfigError where a rank of ``new`` has another number of experts.
    """
    check_instance("current", current, ExpertPlacement)
    check_instance("new", new, ExpertPlacement)
    most = max(map(len, current.ranks)) if max_staged is None else whole_number("max_staged", max_staged)
    return _Steps(current, new.aligned(current), most).run()


class _Steps:
    """``held``: what slots have before a step; ``wanted``: what they shall have."""

    def __init__(self, current: ExpertPlacement, new: ExpertPlacement, most: int) -> None:
        self.num_experts = current.num_experts
        self.held = [list(rank) for rank in current.ranks]
        self.wanted = [list(rank) for rank in new.ranks]
        self.most = most

    def run(self) -> tuple[ExpertPlacement, ...]:
        found = []
        while pending := self._pending():
            writes = self._writes(pending)
            for (rank, local), expert in writes.items():
                self.held[rank][local] = expert
            found.append(ExpertPlacement(self.num_experts, tuple(map(tuple, self.held))))
        return tuple(found)

    def _pending(self) -> list[Slot]:
        return [
            (rank, local)
            for rank, (held, wanted) in enumerate(zip(self.held, self.wanted, strict=True))
            for local, (old, new) in enumerate(zip(held, wanted, strict=True))
            if old != new
        ]

    def _writes(self, pending: list[Slot]) -> dict[Slot, int]:
        """What one step puts into slots, from what slots have before it."""
        replicas = Counter(expert for rank in self.held for expert in rank)
        room = Counter(dict.fromkeys(range(len(self.held)), self.most))
        writes: dict[Slot, int] = {}

        def write(slots: list[Slot]) -> None:
            for slot in slots:
                rank, local = slot
                writes[slot] = self.wanted[rank][local]
                room[rank] -= 1
                replicas[self.held[rank][local]] -= 1
                replicas[writes[slot]] += 1

        left = pending
        while True:
            # slots whose expert is somewhere else too; one that is written may make another such
            free = next((s for s in left if room[s[0]] and replicas[self.held[s[0]][s[1]]] > 1), None)
            if free is not None:
                write([free])
                left = [slot for slot in left if slot != free]
                continue
            # else experts change places in a circle, together
            circle = self._circle([slot for slot in left if replicas[self.held[slot[0]][slot[1]]] == 1], left)
            needed = Counter(rank for rank, _ in circle)
            if circle and all(room[rank] >= count for rank, count in needed.items()):
                write(circle)
                left = [slot for slot in left if slot not in circle]
                continue
            return writes or self._swap(circle)

    def _circle(self, sole: list[Slot], left: list[Slot]) -> list[Slot]:
        """Slots of which each wants what the one before has; each has the only replica of its expert."""
        wants = {self.wanted[rank][local]: (rank, local) for rank, local in reversed(left)}
        for start in sole:
            path: list[Slot] = []
            slot: Slot | None = start
            while slot in sole and slot not in path:
                path.append(slot)
                slot = wants.get(self.held[slot[0]][slot[1]])
            if slot in path:
                return path[path.index(slot) :]
        return []

    def _swap(self, circle: list[Slot]) -> dict[Slot, int]:
        """The first two of a circle that is too long for a step change their experts; the second has its own then."""
        (rank, local), (other, there) = circle[:2]
        given, taken = self.held[rank][local], self.held[other][there]
        if taken in self.wanted[rank]:  # for another slot of this rank, whose order is free
            wanted = self.wanted[rank]
            place = wanted.index(taken)
            wanted[place], wanted[local] = wanted[local], taken
        return {(rank, local): taken, (other, there): given}
