"""Split a change of placement into steps that each move few experts."""

from __future__ import annotations

from collections import Counter

from moe_core.errors import check_instance
from moe_core.parallel.placement.placement import ExpertPlacement
from moe_core.spec.config import whole_number

#: A slot: (rank, local index).
Slot = tuple[int, int]


def placement_steps(
    current: ExpertPlacement, new: ExpertPlacement, max_staged: int | None = None
) -> tuple[ExpertPlacement, ...]:
    """Split a change of placement into a sequence of placements.

    In every step each expert is on some rank, and experts that stay on a rank keep their slot. The function is pure, so
    all ranks compute the same steps.

    Args:
        current: Placement in use.
        new: Placement to reach; the order of experts within a rank is not significant.
        max_staged: Largest number of slots per rank that change in a step; None for no limit.

    Returns:
        Placements of the steps; empty if each rank already has its experts.

    Raises:
        ConfigError: A rank of ``new`` has another number of experts.
    """
    check_instance("current", current, ExpertPlacement)
    check_instance("new", new, ExpertPlacement)
    most = max(map(len, current.ranks)) if max_staged is None else whole_number("max_staged", max_staged)
    return _Steps(current, new.aligned(current), most).run()


class _Steps:
    """State of the search for steps: ``held`` is the content of slots, ``wanted`` the goal."""

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
        """Slots that one step overwrites, with their new experts, which come from the state before."""
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
            # Slots whose expert has another replica. Writing one may create further such slots.
            free = next((s for s in left if room[s[0]] and replicas[self.held[s[0]][s[1]]] > 1), None)
            if free is not None:
                write([free])
                left = [slot for slot in left if slot != free]
                continue
            # Otherwise exchange the experts of a cycle together.
            circle = self._circle([slot for slot in left if replicas[self.held[slot[0]][slot[1]]] == 1], left)
            needed = Counter(rank for rank, _ in circle)
            if circle and all(room[rank] >= count for rank, count in needed.items()):
                write(circle)
                left = [slot for slot in left if slot not in circle]
                continue
            return writes or self._swap(circle)

    def _circle(self, sole: list[Slot], left: list[Slot]) -> list[Slot]:
        """Find a cycle of slots with sole replicas, each wanting the expert of the previous one."""
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
        """Exchange the first two experts of a cycle too long for one step; the second is then final."""
        (rank, local), (other, there) = circle[:2]
        given, taken = self.held[rank][local], self.held[other][there]
        if taken in self.wanted[rank]:  # wanted by another slot of this rank, whose order is free
            wanted = self.wanted[rank]
            place = wanted.index(taken)
            wanted[place], wanted[local] = wanted[local], taken
        return {(rank, local): taken, (other, there): given}
