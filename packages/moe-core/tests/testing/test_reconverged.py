"""Warps that are in two behind an atomic, in machine code as cuobjdump prints it."""

from __future__ import annotations

import pytest
from moe_core.testing.reconverged import has_atomics, split_warps


def sass(*instructions: str) -> str:
    lines = (
        f"        /*{16 * place:04x}*/                   {text} ;      /* 0x0123456789abcdef */"
        for place, text in enumerate(instructions)
    )
    return "\n".join(lines)


SKIP, ATOMIC = "@P2 BRA 0x20", "@P1 ATOMG.E.ADD.STRONG.GPU PT, R3, desc[UR26][R6.64], R3"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (sass(SKIP, ATOMIC, "LDS R2, [UR7]"), ["0x10"]),
        (sass("@!P0 BRA 0x20", ATOMIC, "LDS R2, [UR7]"), ["0x10"]),
        (sass(SKIP, ATOMIC, "BSYNC B1", "LDS R2, [UR7]"), []),
        (sass(SKIP, ATOMIC, "NOP", "BSYNC.RECONVERGENT B1"), []),
        (sass(SKIP, ATOMIC, "NOP", "LDS R2, [UR7]"), ["0x10"]),
        (sass(SKIP, ATOMIC, "WARPSYNC.ALL"), []),
        # the branch of a whole warp
        (sass("@UP0 BRA 0x20", ATOMIC, "LDS R2, [UR7]"), []),
        # the inner branch is joined, the outer one a loop's
        (sass("@P0 BRA 0x50", "@P2 BRA 0x30", ATOMIC, "BSYNC B1", "LDS R2, [UR7]", "EXIT"), []),
        (sass("@P0 BRA 0x40", "@P2 BRA 0x30", ATOMIC, "STS [UR7], R3", "BSYNC B0"), ["0x20"]),
        # backwards: a loop
        (sass("NOP", ATOMIC, "@P1 BRA 0x10", "LDS R2, [UR7]"), []),
        # no branch spans two functions
        (sass("@P2 BRA 0x70", "NOP") + sass("NOP", ATOMIC, *["NOP"] * 6), []),
        # shared memory, and reductions without a result, which nobody waits for
        (sass(SKIP, "ATOMS.AND RZ, [R2], R3", "LDS R2, [UR7]"), []),
        (sass(SKIP, "RED.E.MAX.S32.STRONG.GPU desc[UR4][R2.64], R5", "LDS R2, [UR7]"), []),
        ("", []),
    ],
)
def test_the_target_of_the_innermost_branch_joins_the_warp(code: str, found: list[str]) -> None:
    assert split_warps(code) == found


def test_only_atomics_with_results_are_looked_for() -> None:
    assert has_atomics("@%p1 atom.relaxed.gpu.global.inc.u32 %r1, [%rd1], %r2;")
    assert not has_atomics("red.global.add.u32 [%rd1], 1; // an atom is not asked for")
