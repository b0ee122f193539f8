"""Grouping pairs by expert: the kernel against its twin, the twin against a loop."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from moe_core.kernels.launch.launch import record
from moe_core.kernels.ops import sort
from moe_core.kernels.ops._sizes import max_tiles
from moe_core.kernels.ops.sort import (
    QuantizeRows,
    clears_first,
    sort_pairs,
    sort_pairs_torch,
    sort_workspaces,
    whole_row,
)
from moe_core.spec.workspace import Workspace, workspace_nbytes


def run(ids, experts, block_m, expert_map=None, **options):
    """The kernel over poisoned scratch memory."""
    specs = sort_workspaces(ids.numel(), experts, block_m)
    buffer = torch.full((workspace_nbytes(specs),), 0xFF, dtype=torch.uint8, device=ids.device)
    workspace = Workspace(ids.device, buffer).take(specs)
    return sort_pairs(ids, experts, block_m, workspace=workspace, expert_map=expert_map, **options)


def same(found, expected):
    tiles, kept = int(expected.tiles[0]), int(expected.offsets[-1])
    assert torch.equal(found.offsets, expected.offsets)
    assert torch.equal(found.pairs[:kept], expected.pairs)
    assert found.tiles[:2].tolist() == [tiles, 0]
    assert torch.equal(found.tiles[2 : 2 + 2 * tiles], expected.tiles[2:])


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("experts", [1, 7, 16, 130])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (3, 4), (65, 2), (257, 3), (1500, 2)])
def test_kernel_and_twin_agree(tokens, top_k, experts, block_m, device):
    generator = torch.Generator().manual_seed(tokens * 1000 + experts)
    ids = torch.randint(-2, experts + 3, (tokens, top_k), generator=generator, dtype=torch.int32).to(device)
    same(run(ids, experts, block_m), sort_pairs_torch(ids, experts, block_m))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_expert_map(dtype, device):
    generator = torch.Generator().manual_seed(3)
    # 20 experts, of which 5 live here; one entry of the map is out of range and must drop its pairs
    expert_map = torch.full((20,), -1, dtype=torch.int32)
    expert_map[torch.tensor([2, 3, 11, 17, 19])] = torch.tensor([4, 0, 1, 3, 2], dtype=torch.int32)
    expert_map[7] = 5
    ids = torch.randint(-1, 22, (90, 2), generator=generator, dtype=dtype).to(device)
    expert_map = expert_map.to(device)
    found, expected = run(ids, 5, 16, expert_map), sort_pairs_torch(ids, 5, 16, expert_map=expert_map)
    same(found, expected)
    kept = found.pairs[: int(found.offsets[-1])].long()
    assert set(ids.flatten()[kept].tolist()) <= {2, 3, 11, 17, 19}


def test_twin_against_a_loop():
    ids = torch.tensor([[2, 0], [2, 5], [0, -1], [2, 2]])
    found = sort_pairs_torch(ids, 3, 2)
    assert found.pairs.tolist() == [1, 4, 0, 2, 6, 7]
    assert found.offsets.tolist() == [0, 2, 2, 6]
    assert found.tiles.tolist() == [3, 0, 0, 0, 2, 2, 2, 4]


@pytest.mark.parametrize("expert", [0, 6])
def test_all_on_one_expert(expert, device):
    ids = torch.full((100, 1), expert, dtype=torch.int32, device=device)
    same(run(ids, 7, 16), sort_pairs_torch(ids, 7, 16))


def test_nothing_known(device):
    ids = torch.tensor([[-1, 9], [2**31 - 1, -(2**31)]], dtype=torch.int32, device=device)
    found = run(ids, 4, 16)
    assert int(found.tiles[0]) == 0
    assert found.offsets.tolist() == [0] * 5


def test_two_launches(monkeypatch, device):
    monkeypatch.setattr(sort, "_COUNT_PAIRS", 100)
    ids = torch.randint(-1, 9, (150, 2), generator=torch.Generator().manual_seed(5), dtype=torch.int32).to(device)
    same(run(ids, 8, 16), sort_pairs_torch(ids, 8, 16))


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("count_pairs", [64, 4096], ids=["two_launches", "one_launch"])
@pytest.mark.parametrize(("blocks", "chunks"), [((16, 16, 32), 3), ((16, 16, 16), 40), ((32, 64, 64), 2)])
def test_chunks_of_several_blocks(blocks, chunks, count_pairs, skewed, monkeypatch, device):
    monkeypatch.setattr(sort, "_BLOCK_PAIRS", blocks)
    monkeypatch.setattr(sort, "_MAX_CHUNKS", chunks)
    monkeypatch.setattr(sort, "_COUNT_PAIRS", count_pairs)
    spread = torch.rand(251, 1, generator=torch.Generator().manual_seed(6)) ** (6 if skewed else 1)
    ids = (spread * 11 - 1).int().to(device)  # the last expert of 11 has no pairs, and -1 is none
    found, expected = run(ids, 11, 16, positions=True), sort_pairs_torch(ids, 11, 16)
    same(found, expected)
    kept = expected.pairs.long()
    assert torch.equal(found.positions[kept], torch.arange(len(kept), dtype=torch.int32, device=device))


@pytest.mark.parametrize("pairs", [1000, 2**17, 2**20])
def test_work_does_not_grow_with_the_number_of_experts(pairs):
    def programs(experts):
        ids = torch.empty(pairs // 8, 8, dtype=torch.int32, device="meta")
        specs = sort_workspaces(pairs, experts, 64)
        workspace = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs}
        with record() as launches:
            sort_pairs(ids, experts, 64, workspace=workspace)
        return [one.grid for one in launches]

    # every program reads its own part of the pairs, or all of few
    assert programs(8) == programs(256)
    assert all(grid <= (128,) for grid in programs(8))


def test_workspace_of_many_pairs_suits_fewer():
    # the number of chunks does not grow with every pair
    for experts in (1, 300):
        room = [sort_workspaces(pairs, experts, 16)[3].shape[0] for pairs in range(1, 40_000, 127)]
        assert room == sorted(room)


@pytest.mark.parametrize("pairs", [1, 15, 16, 17, 160])
@pytest.mark.parametrize("experts", [1, 5, 200])
def test_max_tiles_is_a_bound_that_is_met_by_some_routing(pairs, experts):
    worst = 0
    for spread in range(1, min(pairs, experts) + 1):
        # spread experts with one row each beyond whole tiles as far as rows suffice
        ids = torch.arange(pairs) % spread
        worst = max(worst, int(sort_pairs_torch(ids[:, None], experts, 16).tiles[0]))
    assert worst <= max_tiles(pairs, experts, 16)


@triton.jit
def _row_maximum(tile, quant_args, token, AXIS: tl.constexpr):
    """No values; as scale the row's largest element, plus 1000 times the token."""
    return tile, tl.max(tile, axis=AXIS) + 1000.0 * tl.max(token, axis=AXIS)


@pytest.mark.parametrize("launches", [1, 2])
def test_rows_whose_scales_alone_are_kept(launches, monkeypatch, device):
    monkeypatch.setattr(sort, "_COUNT_PAIRS", 1024 if launches == 1 else 10)
    assert clears_first(30) is (launches == 2)
    generator = torch.Generator().manual_seed(8)
    ids = torch.randint(0, 4, (15, 2), generator=generator, dtype=torch.int32).to(device)
    x = torch.randn(15, 70, generator=generator).to(device)
    scales = torch.full((15,), -1.0, device=device)
    zero = torch.full((700,), 5, dtype=torch.int32, device=device)
    specs = sort_workspaces(30, 4, 16)
    workspace = Workspace(device, torch.empty(workspace_nbytes(specs), dtype=torch.uint8, device=device)).take(specs)
    job = QuantizeRows(x, None, scales, _row_maximum, whole_row(70))
    same(sort_pairs(ids, 4, 16, workspace=workspace, rows=job, zero=zero), sort_pairs_torch(ids, 4, 16))
    assert not zero.any()
    # the columns that fill a row up to a power of two count as 0
    assert torch.equal(scales, x.amax(1).clamp(min=0) + 1000.0 * torch.arange(15, device=device))
