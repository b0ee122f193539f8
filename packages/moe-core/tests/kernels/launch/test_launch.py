"""Recorded launches start nothing and say what would have been started."""

from __future__ import annotations

import torch
from moe_core.kernels.launch.launch import Launch, launch, observe, record
from moe_core.kernels.ops.reduce import reduce_pairs
from moe_core.kernels.ops.sort import sort_pairs, sort_workspaces


def meta(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_launch_is_recorded():
    with record() as found:
        reduce_pairs(
            meta(6, 48, dtype=torch.bfloat16), meta(3, 2, dtype=torch.int32), 4, meta(3, 48, dtype=torch.bfloat16)
        )
    (one,) = found
    assert one.name == "reduce_kernel"
    assert one.arguments["y"].dtype is torch.bfloat16
    assert one.arguments["weights"] is None
    assert (one.arguments["TOP_K"], one.arguments["columns"], one.arguments["PDL"]) == (2, 48, False)
    assert one.compiled is None


def test_many_pairs_are_counted_by_a_launch_of_their_own():
    def launches(tokens):
        ids = meta(tokens, 2, dtype=torch.int32)
        workspace = {s.name: meta(*s.shape, dtype=s.dtype) for s in sort_workspaces(tokens * 2, 8, 16)}
        with record() as found:
            sort_pairs(ids, 8, 16, workspace=workspace)
        return found

    assert len(launches(100)) == 1
    assert len(launches(5000)) == 2


def test_nothing_is_launched_for_an_empty_grid():
    with record() as found:
        reduce_pairs(
            meta(0, 48, dtype=torch.bfloat16), meta(0, 2, dtype=torch.int32), 4, meta(0, 48, dtype=torch.bfloat16)
        )
    assert not found


class Kernel:
    """Stands in for Triton's: keeps what it was started with."""

    arg_names = ("x", "N", "PDL", "BLOCK")

    @staticmethod
    def fn():
        """The kernel's function, whose name is told."""

    def __init__(self):
        self.started = []

    def __getitem__(self, grid):
        return lambda *args, **keywords: self.started.append((grid, args, keywords)) or "compiled"


def test_observers_are_told_of_launches_that_were_made():
    kernel, seen = Kernel(), []
    with observe(seen.append):
        launch(kernel, (3,), "x", 5, BLOCK=16, num_warps=4, pdl=True)
    options = {"PDL": True, "BLOCK": 16, "num_warps": 4, "launch_pdl": True, "enable_fp_fusion": True}
    assert kernel.started == [((3,), ("x", 5), options)]
    (one,) = seen
    assert isinstance(one, Launch)
    assert (one.name, one.grid, one.compiled) == ("fn", (3,), "compiled")
    assert list(one.arguments.items()) == [("x", "x"), ("N", 5), ("PDL", True), ("BLOCK", 16)]
    launch(kernel, (3,), "x", 5, BLOCK=16)
    assert len(seen) == 1
