"""Looks in NVIDIA's machine code for warps that are not whole again behind an atomic of one of their threads.

A scalar atomic is a branch that one thread of a program takes: the others jump over it and read its result from shared
memory.  In a loop `ptxas` (12.8, 12.9) may join their paths behind that loop only: until then threads of a warp may
read before the result is there, and barriers and uniform registers, which belong to a whole warp, meet parts of it.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(?:@!?(U?P)[0-9T]+ +)?([A-Z0-9_.]+) *([^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+) *$")


def has_atomics(ptx: str) -> bool:
    """Whether a kernel may have atomics whose result it uses."""
    return re.search(r"\batom\.", ptx) is not None


def split_warps(sass: str) -> list[str]:
    """Addresses of atomics in global memory of some threads of a warp, behind which the warp is not joined."""
    found = []
    #: forward branches of some threads, by target
    open_: dict[int, int] = {}
    skipped: dict[int, list[int]] = {}
    #: atomics whose branches have come to their targets
    pending: list[int] = []
    for match in _INSTRUCTION.finditer(sass):
        address, predicate, name, operands = int(match[1], 16), match[2], match[3], match[4]
        if address == 0:
            # of the next function
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
