"""Looks in Triton's GPU code for barriers of which the memory may be given to data while they are still barriers.

The memory of an mbarrier is no other data's until the barrier has been invalidated (PTX: `mbarrier.inval`).  What
breaks the rule computes the right result as long as it has the GPU to itself.  Where processes share a GPU, one is
stopped in the middle of a kernel; when it goes on, the state of every barrier is put back, and with it eight bytes
over the data that had its place.

Triton gives the memory of an allocation to another one as soon as nothing asks for the first any more, and tells no
barrier.  So each is invalidated, or passed to `warp_specialize`, behind which kernels allocate nothing.

The text is that of Triton 3.6 to 3.9.
"""

from __future__ import annotations

import re

_INDEXED = re.compile(r"(%[\w.#]+) = ttg\.memdesc_(?:index|subslice|subview) (%[\w.#]+)\[")
_OF_BARRIER = re.compile(r"\bttng\.(init|inval)_barrier (%[\w.#]+)")
_PASSED = re.compile(r"\bttg\.warp_specialize\(([^)]*)\)")
_NAME = re.compile(r"%[\w.#]+")


def abandoned_barriers(ttgir: str) -> list[str]:
    """Names of allocations with barriers that are neither invalidated nor passed to all warps."""
    whole: dict[str, str] = {}
    initialised: dict[str, None] = {}
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
                initialised[name] = None
            else:
                kept.add(name)
        elif passed is not None:
            kept.update(_NAME.findall(passed.group(1)))
    return [name for name in initialised if name not in kept]
