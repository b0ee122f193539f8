"""The list of tiles of a batch, and what is quantized and cleared beside it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from moe_core.kernels.ops.batch import Batch, batch_rows, batch_workspaces
from moe_core.kernels.ops.sort import QuantizeRows, whole_row
from moe_core.spec.workspace import Workspace, workspace_nbytes


@triton.jit
def by_expert(tile, quant_args, expert, AXIS: tl.constexpr):
    """Values times the expert's factor; as scale the largest value of the group."""
    return tile * tl.load(quant_args[0] + expert), tl.max(tile, axis=AXIS)


def run(counts, capacity, block_m, device, **arguments):
    specs = batch_workspaces(len(counts), capacity, 16)
    buffer = torch.full((workspace_nbytes(specs),), 0xFF, dtype=torch.uint8, device=device)
    batch = Batch(torch.tensor(counts, dtype=torch.int32, device=device), capacity)
    return batch_rows(batch, block_m, workspace=Workspace(device, buffer).take(specs), **arguments), batch


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("counts", [[0], [5], [0, 17, 40, 16, 0], [40] * 70])
def test_tiles(counts, block_m, device):
    found, batch = run(counts, 40, block_m, device)
    expected = [(e, e * 40 + start) for e, count in enumerate(counts) for start in range(0, count, block_m)]
    tiles = found.tiles.tolist()
    assert tiles[0] == len(expected) <= batch.max_tiles(block_m)
    assert tiles[1] == 0
    assert list(zip(tiles[2::2], tiles[3::2], strict=True))[: tiles[0]] == expected
    assert found.offsets[1:].tolist() == [e * 40 + count for e, count in enumerate(counts)]


def test_counts_beyond_the_buffers_are_cut(device):
    found, _ = run([50, -3, 2], 20, 16, device)
    assert found.offsets[1:].tolist() == [20, 20, 42]
    assert found.tiles[:1].item() == 3


@pytest.mark.parametrize("group", [32, whole_row(96)])
def test_rows_in_use_are_quantized(group, device):
    counts, capacity, columns, width = [3, 0, 5], 5, 70, 96
    x = torch.randn(15, columns, generator=torch.Generator().manual_seed(0)).to(device)
    values = torch.full((15, width), 9.0, device=device)
    groups = -(-width // group)
    scales = torch.full((15, groups), 9.0, device=device)
    factors = torch.tensor([2.0, 3.0, 4.0], device=device)
    zero = torch.full((1000,), 7, dtype=torch.int32, device=device)
    job = QuantizeRows(x, values, scales, by_expert, group, (factors,))
    run(counts, capacity, 16, device, rows=job, zero=zero)
    assert not zero.any()
    padded = torch.nn.functional.pad(x, (0, groups * group - columns))
    for row in range(15):
        expert = row // capacity
        if row % capacity < counts[expert]:
            assert torch.equal(values[row], padded[row, :width] * factors[expert])
            assert torch.equal(scales[row], padded[row].view(groups, group).amax(1))
        else:
            assert bool((values[row] == 9.0).all() and (scales[row] == 9.0).all())
