"""Recorded launches start nothing and describe what would have been compiled."""

from __future__ import annotations

import torch
from moe_core.gemm.specimen import record
from moe_core.ops.reduce import reduce_pairs
from moe_core.ops.sort import sort_pairs, sort_workspaces


def meta(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_launch_is_recorded():
    with record() as found:
        reduce_pairs(
            meta(6, 48, dtype=torch.bfloat16), meta(3, 2, dtype=torch.int32), 4, meta(3, 48, dtype=torch.bfloat16)
        )
    (specimen,) = found
    assert specimen.name == "reduce_kernel"
    assert specimen.signature["y"] == "*bf16"
    assert specimen.signature["ids"] == "*i32"
    assert specimen.signature["weights"] == "constexpr"
    assert specimen.signature["columns"] == "i32"
    names = list(specimen.signature)
    assert specimen.constexprs[(names.index("TOP_K"),)] == 2
    assert specimen.constexprs[(names.index("weights"),)] is None
    assert (names.index("columns"),) in specimen.attrs


def test_equal_launches_have_equal_keys():
    def launches(tokens, dtype):
        ids = meta(tokens, 2, dtype=dtype)
        workspace = {s.name: meta(*s.shape, dtype=s.dtype) for s in sort_workspaces(tokens * 2, 8, 16)}
        with record() as found:
            sort_pairs(ids, 8, 16, workspace=workspace)
        return [specimen.key for specimen in found]

    assert launches(100, torch.int32) == launches(100, torch.int32)
    assert launches(100, torch.int32) != launches(100, torch.int64)
    assert len(launches(5000, torch.int32)) == 2


def test_nothing_is_launched_for_an_empty_grid():
    with record() as found:
        reduce_pairs(
            meta(0, 48, dtype=torch.bfloat16), meta(0, 2, dtype=torch.int32), 4, meta(0, 48, dtype=torch.bfloat16)
        )
    assert not found
