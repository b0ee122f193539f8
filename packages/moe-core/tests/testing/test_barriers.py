"""Barriers whose memory may be given away, in text as Triton prints it."""

from __future__ import annotations

import pytest
from moe_core.testing.barriers import abandoned_barriers

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
