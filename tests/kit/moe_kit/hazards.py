"""Find hazards in compiled kernels that tests rarely show. The patterns match Triton 3.6 to 3.9."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from moe_core.testing.compile import cuobjdump

_PRODUCT = re.compile(r"\bttng\.warp_group_dot %.*\bisAsync = true.*\} : tensor<")
_WAIT = re.compile(r"\bttng\.warp_group_dot_wait\b.*pendings = (\d+)")
_INDEXED = re.compile(r"(%[\w.#]+) = ttg\.memdesc_(?:index|subslice|subview) (%[\w.#]+)\[")
_BARRIER = re.compile(r"\bttng\.(init|inval)_barrier (%[\w.#]+)")
_PASSED = re.compile(r"\bttg\.warp_specialize\(([^)]*)\)")
_NAME = re.compile(r"%[\w.#]+")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(?:@!?(U?P)[0-9T]+ +)?([A-Z0-9_.]+) *([^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+) *$")


def hazards(kernel: Any) -> Iterator[str]:
    """Yield the hazards of a kernel that Triton has compiled.

    Args:
        kernel: The kernel.

    Yields:
        Descriptions that follow the kernel's name.
    """
    ttgir, ptx = kernel.asm.get("ttgir", ""), kernel.asm.get("ptx", "")
    running = products_in_flight(ttgir)
    if running:
        yield (
            f"has up to {running} products with registers in flight at the end of a loop's step: "
            "moe_core.kernels.device.wait.wait_for_mma makes them end there"
        )
    abandoned = abandoned_barriers(ttgir)
    if abandoned:
        yield (
            "has barriers that are neither invalidated nor passed to warp_specialize, so that data may get their "
            f"memory: {', '.join(abandoned)}"
        )
    # Only atomics whose result is used can split a warp.
    split = split_warps(cuobjdump(kernel, "--dump-sass")) if "atom." in ptx else []
    if split:
        yield (
            f"does not join a warp again behind its atomics at {', '.join(split)}: let all threads pass the "
            "instruction, one of them by a predicate"
        )
    if getattr(kernel.metadata, "launch_pdl", False) and "griddepcontrol.wait" not in ptx:
        yield "may overlap the launch before it, and never waits for it: moe_core.kernels.device.pdl.begin_pdl"


def products_in_flight(ttgir: str) -> int:
    """Count asynchronous products with register operands that may be in flight at a loop's next iteration.

    Such a product still reads registers that the next iteration overwrites. The left operand is in registers. See
    :mod:`moe_core.kernels.device.wait`.

    Args:
        ttgir: TTGIR of a kernel.

    Returns:
        The largest number over all loops.
    """
    most = depth = 0
    #: for each enclosing loop: the brace depth outside of it, and its products in flight
    loops: list[tuple[int, int]] = []
    for line in ttgir.splitlines():
        wait = _WAIT.search(line)
        if "scf.for" in line:
            loops.append((depth, 0))
        elif loops and wait is not None:
            loops[-1] = (loops[-1][0], min(loops[-1][1], int(wait[1])))
        elif loops and _PRODUCT.search(line):
            loops[-1] = (loops[-1][0], loops[-1][1] + 1)
        depth += line.count("{") - line.count("}")
        if loops and depth <= loops[-1][0]:
            most = max(most, loops.pop()[1])
    return most


def abandoned_barriers(ttgir: str) -> list[str]:
    """Return the allocations with mbarriers that are neither invalidated nor passed to all warps.

    The memory of an mbarrier must not hold other data until the barrier is invalidated (PTX: `mbarrier.inval`). If a
    process is preempted in the middle of a kernel, the state of every barrier is restored, which overwrites eight bytes
    of the data that took its place. Triton reuses the memory of an allocation after its last use and does not
    invalidate barriers in it. So every barrier must be invalidated, or passed to `warp_specialize`, after which kernels
    allocate nothing.

    Args:
        ttgir: TTGIR of a kernel.

    Returns:
        Names of the allocations, such as ``%0``.
    """
    whole: dict[str, str] = {}
    initialized: dict[str, None] = {}
    kept: set[str] = set()
    for line in ttgir.splitlines():
        indexed, barrier, passed = _INDEXED.search(line), _BARRIER.search(line), _PASSED.search(line)
        if indexed is not None:
            whole[indexed[1]] = whole.get(indexed[2], indexed[2])
        elif barrier is not None:
            name = whole.get(barrier[2], barrier[2])
            if barrier[1] == "init":
                initialized[name] = None
            else:
                kept.add(name)
        elif passed is not None:
            kept.update(_NAME.findall(passed[1]))
    return [name for name in initialized if name not in kept]


def split_warps(sass: str) -> list[str]:
    """Return the addresses of divergent global atomics after which the warp does not reconverge.

    A scalar atomic is a branch that one thread of a CTA takes. The other threads jump over it and read its result from
    shared memory. In a loop, `ptxas` (12.8, 12.9) may move the reconvergence point behind the loop. Until then, threads
    of a warp may read before the result is there. Barriers and uniform registers, which belong to a whole warp, are
    used by diverged threads.

    Args:
        sass: Machine code of a cubin.

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
