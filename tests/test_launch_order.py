"""Kernels that may overlap the preceding launch wait for it before they touch what it writes.

With programmatic dependent launch (`moe_core.kernels.device.pdl`) the first CTAs of a kernel run while the preceding
launch still runs. Before the wait they may only read what is older than that launch. The source is checked: the wait is
volatile, so a compiler moves no memory access across it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WAITS = {"begin_pdl", "tl.extra.cuda.gdc_wait"}
#: kernels (and a device function) that do more before they wait: the arguments that the preceding launch writes, and
#: the functions that may access memory. Of gemm2, routing, schedule and weights are older than gemm1, which has waited.
EARLY = {
    "gemv_kernel": ("x stride_x", "locate_vector store_zeros"),
    "_row_sums": ("x", "prefetch_l2 word_pointers _in_steps"),
    "gemv_mma_kernel": ("x stride_x", "locate_vector store_zeros _rows _load_steps"),
    "scaled_gemv_kernel": ("x stride_x", "locate_vector expert_of _per_vector gl.load _load_step"),
    "grouped_gemm_kernel": ("a_args", "tl.load tile_of locate functions.open_b"),
    # The router's ids are older than the launch that makes y.
    "reduce_kernel": ("y weights rows", "local_expert"),
}
#: what computes addresses, layouts and constants
PURE = {
    *("BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "allocate_shared_memory", "arange", "cdiv"),
    *("convert_layout", "expand_dims", "maximum", "minimum", "num_warps", "pointer_type"),
    *("program_id", "range", "static_range", "sum", "to", "where", "zeros"),
}
#: device functions that wait for a kernel
WAITS_IN = {"gemv_kernel": "_row_sums"}
#: CTAs that exit early and are never the first, which waits for all
EXITS = {"grouped_gemm_kernel": 1}


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions of device code that wait for the preceding launch."""
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        if path.name == "pdl.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(name in WAITS for name, _ in calls(node)):
                yield f"{path.stem}:{node.name}", node


def calls(*nodes: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                yield ast.unparse(inner.func), inner


def findings(kernel: ast.FunctionDef) -> list[str]:
    """What a kernel does wrong before it waits, at the end of its first statements."""
    data, memory = (text.split() for text in EARLY.get(kernel.name, ("", "")))
    waits = {*WAITS, WAITS_IN.get(kernel.name)}
    waiting = [any(name in waits for name, _ in calls(statement)) for statement in kernel.body]
    last = max(at for at, waits_here in enumerate(waiting) if waits_here)
    early = [statement for statement, waits_here in zip(kernel.body[:last], waiting, strict=False) if not waits_here]
    found = []
    for name, call in calls(*early):
        if name not in (*memory, "wait_at_first") and name.rpartition(".")[2] not in PURE:
            found.append(f"calls {name} in line {call.lineno}")
    for statement in early:
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        found += [f"mentions {name} in line {statement.lineno}" for name in sorted(names.intersection(data))]
    exits = [
        block
        for statement in early
        for block in ast.walk(statement)
        if isinstance(block, ast.If) and any(isinstance(one, ast.Return) for one in block.body)
    ]
    silent = [block for block in exits if not any(name == "wait_at_first" for name, _ in calls(*block.body))]
    if len(silent) > EXITS.get(kernel.name, 0):
        found.append(f"returns without a wait in line {silent[-1].lineno}")
    return found


KERNELS = dict(kernels())


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_wait_before_they_touch_what_the_launch_before_writes(name: str) -> None:
    assert findings(KERNELS[name]) == []


def test_every_exception_has_a_kernel() -> None:
    assert EARLY.keys() | EXITS.keys() <= {kernel.name for kernel in KERNELS.values()}
    assert len(KERNELS) > 15


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("begin_pdl(PDL); v = tl.load(x)", []),
        ("i = tl.program_id(0); begin_pdl(PDL); v = tl.load(x)", []),
        ("v = tl.load(x); begin_pdl(PDL)", ["calls tl.load in line 1"]),
        ("if PDL and GEMM1:\n  begin_pdl(PDL)\nv = tl.load(x)\nbegin_pdl(PDL)", ["calls tl.load in line 3"]),
        ("v = helper(x); begin_pdl(PDL)", ["calls helper in line 1"]),
        ("if x is None:\n  return\nbegin_pdl(PDL)", ["returns without a wait in line 1"]),
        ("if x is None:\n  wait_at_first(PDL)\n  return\nbegin_pdl(PDL)", []),
    ],
)
def test_what_is_too_early_is_found(body: str, expected: list[str]) -> None:
    kernel = ast.parse("def kernel(x): pass").body[0]
    assert isinstance(kernel, ast.FunctionDef)
    kernel.body = ast.parse(body).body
    assert findings(kernel) == expected


def test_data_of_the_launch_before_is_found() -> None:
    source = "def reduce_kernel(y, ids): \n  e = local_expert(ids, y)\n  begin_pdl(PDL)"
    kernel = ast.parse(source).body[0]
    assert isinstance(kernel, ast.FunctionDef)
    assert findings(kernel) == ["mentions y in line 2"]
