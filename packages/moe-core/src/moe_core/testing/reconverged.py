"""Find warps in NVIDIA machine code that do not reconverge after an atomic of one thread.

A scalar atomic is a branch that one thread of a CTA takes. The other threads jump over it and read its result from
shared memory. In a loop, `ptxas` (12.8, 12.9) may move the reconvergence point behind the loop. Until then, threads of
a warp may read before the result is there. Barriers and uniform registers, which belong to a whole warp, are used by
diverged threads.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(?:@!?(U?P)[0-9T]+ +)?([A-Z0-9_.]+) *([^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+) *$")


def has_atomics(ptx: str) -> bool:
    """Whether a kernel may have atomics whose result it uses.

    Args:
        ptx: PTX of the kernel.

    Returns:
        True if the PTX has an ``atom`` instruction.
    """
    return re.search(r"\batom\.", ptx) is not None


def split_warps(sass: str) -> list[str]:
    """Return the addresses of divergent global atomics after which the warp does not reconverge.

    Args:
        sass: Machine code of a cubin, as ``cuobjdump --dump-sass`` prints it.

    Returns:
        Hexadecimal addresses of the atomics.
    """
    found = []
    #: divergent forward branches, as source address by target address
    open_: dict[int, int] = {}
    skipped: dict[int, list[int]] = {}
    #: atomics whose branch targets have been reached
    pending: list[int] = []
    for match in _INSTRUCTION.finditer(sass):
        address, predicate, name, operands = int(match[1], 16), match[2], match[3], match[4]
        if address == 0:
            # Address 0 starts the next function.
            open_, skipped, pending = {}, {}, []
        pending += skipped.pop(address, [])
        if name != "NOP":
            if not name.startswith(("BSYNC", "WARPSYNC")):
                found += [hex(atomic) for atomic in pending]
            pending = []
        open_ = {target: source for target, source in open_.items() if target > address}
        target = _TARGET.search(operands)
        if name == "BRA" and predicate == "P" and target is not None and int(target[1], 16) > address:
            open_[int(target[1], 16)] = address
        elif name.startswith(("ATOM.", "ATOMG.")) and open_:
            innermost = max(open_, key=lambda at: open_[at])
            skipped.setdefault(innermost, []).append(address)
    return found
