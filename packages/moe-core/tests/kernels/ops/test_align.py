"""Rows aligned by expert, against a construction by hand."""

from __future__ import annotations

import pytest
import torch
from moe_core.kernels.ops.align import align_pairs, align_workspaces, aligned_rows, local_ids
from moe_core.kernels.ops.reduce import reduce_pairs, reduce_pairs_torch
from moe_core.spec.workspace import Workspace


def run(ids, experts, block_m, device, expert_map=None, poison=0x7B):
    workspace = Workspace(device)
    specs = align_workspaces(ids.numel(), experts, block_m)
    taken = workspace.take(specs)
    workspace._buffer.fill_(poison)
    return align_pairs(ids, experts, block_m, workspace=taken, expert_map=expert_map)


@pytest.mark.parametrize("block_m", [16, 128])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 4), (17, 3, 5), (90, 4, 6)])
def test_tiles_belong_to_one_expert(tokens, top_k, experts, block_m, device):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator, dtype=torch.int32)
    aligned = run(ids.to(device), experts, block_m, device)
    index, owners, positions = (t.cpu() for t in (aligned.index, aligned.row_experts, aligned.positions))
    flat = ids.flatten()
    counts = [int((flat == e).sum()) for e in range(experts)]
    used = sum(-(-n // block_m) * block_m for n in counts)
    assert int(aligned.count) == used
    assert len(index) == aligned_rows(ids.numel(), experts, block_m) >= used
    row = 0
    for expert, count in enumerate(counts):
        height = -(-count // block_m) * block_m
        pairs = (flat == expert).nonzero().flatten().int()
        assert torch.equal(index[row : row + count], pairs)
        assert (index[row + count : row + height] == -1).all()
        assert (owners[row : row + height] == expert).all()
        assert torch.equal(positions[pairs.long()], torch.arange(row, row + count, dtype=torch.int32))
        row += height
    assert (index[row:] == -1).all()
    assert (owners[row:] == -1).all()


def test_expert_map(device):
    ids = torch.tensor([[0, 3], [2, 3]], device=device)
    expert_map = torch.tensor([-1, 0, 7, 1], dtype=torch.int32, device=device)
    aligned = run(ids, 2, 16, device, expert_map)
    assert aligned.index[:2].tolist() == [1, 3]
    assert aligned.row_experts[:16].eq(1).all()
    assert int(aligned.count) == 16


def test_no_tokens(device):
    ids = torch.empty(0, 2, dtype=torch.int32, device=device)
    assert aligned_rows(0, 8, 128) == 0
    assert len(run(ids, 8, 128, device).index) == 0


def test_reduce_reads_the_rows_named(device):
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(9, 40, generator=generator).to(device)
    ids = torch.tensor([[0, 1], [1, -1]], dtype=torch.int32, device=device)
    rows = torch.tensor([4, 8, 0, 2**30], dtype=torch.int32, device=device)
    weights = torch.rand(2, 2, generator=generator).to(device)
    out = torch.empty(2, 40, device=device)
    reduce_pairs(y, ids, 2, out, topk_weights=weights, rows=rows)
    assert torch.equal(out, reduce_pairs_torch(y, ids, 2, torch.empty_like(out), topk_weights=weights, rows=rows))
    expected = torch.stack([weights[0, 0] * y[4] + weights[0, 1] * y[8], weights[1, 0] * y[0]])
    torch.testing.assert_close(out, expected, rtol=2**-22, atol=2**-22)


def test_local_ids(device):
    expert_map = torch.tensor([-1, 0, 7, 1], dtype=torch.int32, device=device)
    ids = torch.tensor([[0, 1], [2, 3], [-1, 4], [2**32 + 1, -(2**33)]], device=device)
    out = torch.empty(4, 2, dtype=torch.int32, device=device)
    assert local_ids(ids, 2, out, none=9, expert_map=expert_map).tolist() == [[9, 0], [9, 1], [9, 9], [9, 9]]
    assert local_ids(ids, 3, out).tolist() == [[0, 1], [2, -1], [-1, -1], [-1, -1]]
