"""Find mbarriers in Triton's GPU code whose memory may be reused while they are still valid.

The memory of an mbarrier must not hold other data until the barrier is invalidated (PTX: `mbarrier.inval`). Code that
breaks the rule computes the right result as long as it has the GPU to itself. If processes share a GPU, a process may
be preempted in the middle of a kernel. On resumption, the state of every barrier is restored, which overwrites eight
bytes of the data that took its place.

Triton reuses the memory of an allocation after its last use and does not invalidate barriers in it. So every barrier
must be invalidated, or passed to `warp_specialize`, after which kernels allocate nothing.

The patterns match the IR of Triton 3.6 to 3.9.
"""

from __future__ import annotations

import re

_INDEXED = re.compile(r"(%[\w.#]+) = ttg\.memdesc_(?:index|subslice|subview) (%[\w.#]+)\[")
_OF_BARRIER = re.compile(r"\bttng\.(init|inval)_barrier (%[\w.#]+)")
_PASSED = re.compile(r"\bttg\.warp_specialize\(([^)]*)\)")
_NAME = re.compile(r"%[\w.#]+")


def abandoned_barriers(ttgir: str) -> list[str]:
    """Return the allocations with barriers that are neither invalidated nor passed to all warps.

    Args:
        ttgir: TTGIR of a kernel.

    Returns:
        Names of the allocations, such as ``%0``.
    """
    whole: dict[str, str] = {}
    initialized: dict[str, None] = {}
    kept: set[str] = set()
    for line in ttgir.splitlines():
        indexed, barrier, passed = _INDEXED.search(line), _OF_BARRIER.search(line), _PASSED.search(line)
        if indexed is not None:
            part, of = indexed.groups()
            whole[part] = whole.get(of, of)
        elif barrier is not None:
            kind, name = barrier.groups()
            name = whole.get(name, name)
            if kind == "init":
                initialized[name] = None
            else:
                kept.add(name)
        elif passed is not None:
            kept.update(_NAME.findall(passed.group(1)))
    return [name for name in initialized if name not in kept]
