"""Products with registers in flight, in text as Triton prints it."""

from __future__ import annotations

import pytest
from moe_core.testing.in_flight import register_products_in_flight

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
    assert register_products_in_flight("\n".join(lines)) == expected
