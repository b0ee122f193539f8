"""Hazards in code as Triton and cuobjdump print it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from moe_kit.hazards import abandoned_barriers, hazards, products_in_flight, split_warps

_LOOP = "%r:2 = scf.for %k = %c0 to %n step %c1 iter_args(%acc = %zero) -> (tensor<128x128xf32, #mma>)  : i32 {"
_REGISTERS = (
    "%p = ttng.warp_group_dot %a, %b, %acc {inputPrecision = 0 : i32, isAsync = true} : "
    "tensor<128x16xbf16, #ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 2}>> * "
    "!ttg.memdesc<16x128xbf16, #shared, #smem> -> tensor<128x128xf32, #mma> loc(#loc1)"
)
_SHARED = _REGISTERS.replace("tensor<128x16xbf16, #ttg.dot_op<{opIdx = 0, parent = #mma, kWidth = 2}>>", "!ttg.memdesc")
_END = "} loc(#loc2)"


def _wait(pendings: int) -> str:
    return f"%w:2 = ttng.warp_group_dot_wait %p, %b {{pendings = {pendings} : i32}} : tensor<128x128xf32, #mma> loc(#l)"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((_LOOP, _REGISTERS, _wait(7), _REGISTERS, _wait(7), _END), 2),
        ((_LOOP, *[_REGISTERS] * 8, _wait(7), _END, _wait(0)), 7),
        ((_LOOP, _REGISTERS, _REGISTERS, _wait(0), _END), 0),
        ((_LOOP, _REGISTERS, _END, _LOOP, _REGISTERS, _wait(0), _END), 1),
        # an outer loop around one that has ended its products
        ((_LOOP, _LOOP, _REGISTERS, _wait(0), _END, _END), 0),
        # shared memory is kept by Triton's pipeline
        ((_LOOP, _SHARED, _wait(1), _END), 0),
        ((_LOOP, _REGISTERS.replace("true", "false"), _END), 0),
        # no next step
        ((_REGISTERS, _wait(0)), 0),
        ((), 0),
    ],
)
def test_only_what_the_next_step_overwrites_counts(lines: tuple[str, ...], expected: int) -> None:
    assert products_in_flight("\n".join(lines)) == expected


_MEMORY = "!ttg.memdesc<1xi64, #shared1, #smem, mutable> loc(#loc1)"
_ALLOCATED = "%met = ttg.local_alloc : () -> " + _MEMORY
_RING = "%full_2 = ttg.local_alloc : () -> !ttg.memdesc<4x1xi64, #shared1, #smem, mutable> loc(#loc1)"
_SLOT = "%0 = ttg.memdesc_index %full_2[%c0_i32] : !ttg.memdesc<4x1xi64, #shared1, #smem, mutable> -> " + _MEMORY
_LATER_SLOT = _SLOT.replace("%0 =", "%7 =").replace("%c0_i32", "%turn")


def _initialized(name: str) -> str:
    return f"ttng.init_barrier {name}, 2 : {_MEMORY}"


def _invalidated(name: str) -> str:
    return f"ttng.inval_barrier {name} : {_MEMORY}"


def _passed(*names: str) -> str:
    return f"ttg.warp_specialize(%a_tiles, {', '.join(names)}) attributes {{requestedRegisters = array<i32: 232, 40>}}"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((_ALLOCATED, _initialized("%met"), _passed("%tiles", "%N")), ["%met"]),
        ((_ALLOCATED, _initialized("%met"), _passed("%tiles", "%met", "%N")), []),
        ((_ALLOCATED, _initialized("%met"), _invalidated("%met")), []),
        ((_RING, _SLOT, _initialized("%0"), _passed("%full_2")), []),
        ((_RING, _SLOT, _initialized("%0"), _LATER_SLOT, _invalidated("%7")), []),
        # of another allocation whose name begins alike
        ((_RING, _SLOT, _initialized("%0"), _passed("%full")), ["%full_2"]),
        ((_RING, _SLOT, _initialized("%0"), _ALLOCATED, _initialized("%met"), _passed("%full_2")), ["%met"]),
        ((_RING, _passed("%tiles")), []),
        ((), []),
    ],
)
def test_a_barrier_is_invalidated_or_lives_as_long_as_the_kernel(lines: tuple[str, ...], found: list[str]) -> None:
    assert abandoned_barriers("\n".join(lines)) == found


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


def kernel(*, pdl: bool, **asm: str) -> SimpleNamespace:
    return SimpleNamespace(asm=asm, metadata=SimpleNamespace(launch_pdl=pdl))


def test_every_hazard_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_kit.hazards.cuobjdump", lambda kernel, option: sass(SKIP, ATOMIC, "LDS R2, [UR7]"))
    ttgir = "\n".join((_LOOP, _REGISTERS, _END, _ALLOCATED, _initialized("%met")))
    found = list(hazards(kernel(pdl=True, ttgir=ttgir, ptx="atom.global.add")))
    assert len(found) == 4
    assert ["wait_for_mma" in found[0], "%met" in found[1], "0x10" in found[2], "begin_pdl" in found[3]] == [True] * 4
    assert list(hazards(kernel(pdl=True, ptx="griddepcontrol.wait;"))) == []
    assert list(hazards(kernel(pdl=False, amdgcn=""))) == []
