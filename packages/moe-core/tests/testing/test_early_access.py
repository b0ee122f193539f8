"""Accesses before the wait for the launch before, in PTX as Triton prints it."""

from __future__ import annotations

import pytest
from moe_core.testing import early_access
from moe_core.testing.early_access import Allowed, early_accesses, refused_accesses, waits

# a tensor, a tensor descriptor, a number, a tensor
HEAD = """
.visible .entry copy(
	.param .u64 .ptr .global .align 1 copy_param_0,
	.param .align 64 .b8 copy_param_1[128],
	.param .u32 copy_param_2,
	.param .u64 .ptr .global .align 1 copy_param_3
)
.reqntid 128
{
	.reg .pred 	%p<3>;
	.loc	1 14 0                          // copy.py:14:0
$L__func_begin0:
	ld.param.b64 	%rd1, [copy_param_0];
	ld.param.b32 	%r1, [copy_param_2];
	mov.b64 	%rd9, copy_param_1;
	mul.wide.s32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
	mov.b32 	%r2, 0;
	mov.b32 	%r3, %r2;
	setp.eq.b32 	%p1, %r1, 0;
"""
SIGNATURE = (
    'tt.func public @copy(%x: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("x"(#loc)), '
    '%d: !tt.tensordesc<tensor<8x8xf32>> loc("w_desc"(#loc)), %result.n: i32 loc("result.n"(#loc)), '
    '%result.out: !tt.ptr<f32> loc("result.out"(#loc))) attributes {noinline = false} {'
)
WAIT = "// begin inline asm\n\tgriddepcontrol.wait; // dummy %r9\n\t// end inline asm"
LOAD = "@%p1 ld.global.b32 { %r4 }, [ %rd3 + 0 ];"
STORE = "ld.param.b64 %rd4, [copy_param_3];\n\tst.global.v2.b32 [ %rd4 + 0 ], { %r4, %r5 };"
ZEROS = "ld.param.b64 %rd4, [copy_param_3];\n\tst.global.v2.b32 [ %rd4 + 0 ], { %r2, %r3 };"
TMA = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r7], [%rd9, {%r1, %r2}], [%r8];"


def ptx(*lines: str) -> str:
    return HEAD + "".join(f"\t{line}\n" for line in (*lines, "ret;")) + "$L__func_end0:\n}\n"


def found(*lines: str) -> list[tuple[str, set[int]]]:
    return [(one.operation.partition(".shared")[0], set(one.parameters)) for one in early_accesses(ptx(*lines))]


READ, WRITTEN = ("ld.global.b32", {0}), ("st.global.v2.b32", {3})


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((WAIT, LOAD, STORE), []),
        ((LOAD, WAIT, STORE), [READ]),
        ((STORE, WAIT, LOAD), [WRITTEN]),
        ((LOAD, STORE), [READ, WRITTEN]),
        # no global memory
        (("ld.shared.b32 %r4, [%r1];", "st.shared::cta.b32 [%r1], %r4;", "cp.async.wait_group 0;", WAIT), []),
        (("ld.const.b32 %r4, [table];", "bar.sync 0;", "redux.sync.max.s32 %r4, %r1, -1;", WAIT), []),
        (("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r1], %rd1;", WAIT), []),
        # memory of any kind
        (("ld.b32 %r4, [%rd3];", WAIT), [("ld.b32", {0})]),
        (("red.global.add.u32 [%rd3], 1;", WAIT), [("red.global.add.u32", {0})]),
        (("{ .reg .pred %p; @%p prefetch.global.L2 [%rd3]; mov.u32 %r4, 0; }", WAIT), [("prefetch.global.L2", {0})]),
        ((TMA, WAIT), [("cp.async.bulk.tensor.2d", {1})]),
        (("call.uni other, (param0);", WAIT), [("call.uni", set())]),
        # an element that a loaded number chooses, and an address from memory
        ((LOAD, "ld.param.b64 %rd4, [copy_param_3];", "mad.wide.s32 %rd5, %r4, 4, %rd4;", "ld.global.b32 %r5, [%rd5];"),
         [READ, ("ld.global.b32", {3})]),
        (("ld.global.b64 %rd5, [%rd1];", "st.global.b32 [%rd5], %r2;"),
         [("ld.global.b64", {0}), ("st.global.b32", set())]),
        # either of two tensors
        (("ld.param.b64 %rd4, [copy_param_3];", "selp.b64 %rd5, %rd1, %rd4, %p1;", "ld.global.b32 %r5, [%rd5];", WAIT),
         [("ld.global.b32", {0, 3})]),
    ],
)  # fmt: skip
def test_accesses_before_the_wait(lines: tuple[str, ...], expected: list[tuple[str, set[int]]]) -> None:
    assert found(*lines) == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # on a path that ends without waiting
        (("@%p1 bra $L__BB0_1;", WAIT, LOAD, "ret;", "$L__BB0_1:", STORE), [WRITTEN]),
        (("@!%p1 bra $L__BB0_1;", STORE, "bra.uni $L__BB0_2;", "$L__BB0_1:", WAIT, LOAD, "$L__BB0_2:"), [WRITTEN]),
        # one branch waits and ends, the other does not
        (("@%p1 bra $L__BB0_1;", WAIT, "$L__BB0_1:", LOAD), [READ]),
        # both wait
        (("@%p1 bra $L__BB0_1;", WAIT, LOAD, "ret;", "$L__BB0_1:", WAIT, STORE), []),
        # where no path goes
        (("bra.uni $L__BB0_1;", LOAD, "$L__BB0_1:", WAIT), []),
        # backwards: the load is before the wait of the next turn only
        (("$L__BB0_1:", WAIT, LOAD, "@%p1 bra $L__BB0_1;"), []),
        (("bra.uni $L__BB0_2;", "$L__BB0_1:", LOAD, WAIT, "ret;", "$L__BB0_2:", "bra.uni $L__BB0_1;"), [READ]),
        # the wait of some threads
        (("@%p1 griddepcontrol.wait;", LOAD), [READ]),
        # Triton 3.6 prints the table at the branch, 3.9 in front
        (("$L_brx_0: .branchtargets\n\t$L__BB0_1,\n\t$L__BB0_2;", "brx.idx %r1, $L_brx_0;", "$L__BB0_1:", WAIT, STORE,
          "ret;", "$L__BB0_2:", LOAD), [READ]),
        # a block of inline assembly with a label
        (("{", ".reg .pred complete;", "waitLoop:", "mbarrier.try_wait.parity.shared.b64 complete, [%r1], %r2;",
          "@!complete bra.uni waitLoop;", "}", LOAD, WAIT), [READ]),
    ],
)  # fmt: skip
def test_all_paths_are_followed(lines: tuple[str, ...], expected: list[tuple[str, set[int]]]) -> None:
    assert found(*lines) == expected


#: specialized warps: the others begin at $L__BB0_1, where the first ones let them go
FIRST, GATE = "@!%p1 bra $L__BB0_1;", "barrier.sync 1;"
OTHERS = ("ret;", "$L__BB0_1:", GATE, LOAD, "bra.uni $L__BB0_1;")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((FIRST, WAIT, GATE, STORE, *OTHERS), []),
        ((FIRST, STORE, WAIT, GATE, *OTHERS), [WRITTEN]),
        # the first ones let the others go before they wait
        ((FIRST, GATE, WAIT, STORE, *OTHERS), [READ]),
        # nobody lets these go
        ((FIRST, WAIT, STORE, *OTHERS), [READ]),
        # a barrier of one group of warps, and that of kernels without groups
        ((FIRST, WAIT, GATE, STORE, "ret;", "$L__BB0_1:", "bar.sync 2, 128;", LOAD), [READ]),
        (("bar.sync 0;", LOAD, "bar.sync 0;", WAIT), [READ]),
    ],
)
def test_specialized_warps_are_let_go_by_those_that_waited(
    lines: tuple[str, ...], expected: list[tuple[str, set[int]]]
) -> None:
    assert found(*lines) == expected


@pytest.mark.parametrize(
    ("kernel", "constants", "lines", "refused"),
    [
        ("copy", {}, (LOAD, WAIT), ["ld.global.b32 of x"]),
        ("copy", {}, (LOAD, "ld.global.b32 %r5, [%rd1];", ZEROS), ["ld.global.b32 of x", "st.global.v2.b32 of result"]),
        ("copy", {}, (TMA.replace("%rd9", "%rd5"), WAIT), [f"{TMA.split()[0]} of an unknown address"]),
        ("reads_x", {}, (LOAD, WAIT, STORE), []),
        ("reads_x", {}, ("st.global.b32 [%rd3], %r1;", WAIT), ["st.global.b32 of x"]),
        ("reads_x", {}, ("st.global.b32 [%rd3], %r2;", WAIT), ["st.global.b32 of x"]),
        ("reads_x", {}, ("atom.global.add.u32 %r4, [%rd3], 1;", WAIT), ["atom.global.add.u32 of x"]),
        ("reads_x", {}, (TMA, WAIT), [f"{TMA.split()[0]} of w_desc"]),
        ("sets_zeros", {("SECOND",): True}, (ZEROS, WAIT), []),
        ("sets_zeros", {("SECOND",): True}, (STORE, WAIT), ["st.global.v2.b32 of result"]),
        ("sets_zeros", {("SECOND",): True}, (LOAD, ZEROS, WAIT), ["ld.global.b32 of x"]),
        ("sets_zeros", {("SECOND",): False}, (ZEROS, WAIT), ["st.global.v2.b32 of result"]),
        ("sets_zeros", {}, (ZEROS, WAIT), ["st.global.v2.b32 of result"]),
    ],
)
def test_what_a_kernel_may_do_is_declared(
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    constants: dict[tuple[str | int, ...], object],
    lines: tuple[str, ...],
    refused: list[str],
) -> None:
    allowed = {
        "reads_x": Allowed(frozenset({"x"})),
        "sets_zeros": Allowed(frozenset(), frozenset({"result"}), (("SECOND",), True)),
    }
    monkeypatch.setattr(early_access, "ALLOWED", allowed)
    assert refused_accesses(kernel, constants, SIGNATURE, ptx(*lines)) == refused


def test_a_kernel_that_never_waits_is_known() -> None:
    assert waits(ptx(WAIT, LOAD))
    assert not waits(ptx("griddepcontrol.launch_dependents;", LOAD))
