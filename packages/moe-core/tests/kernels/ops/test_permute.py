"""Moving rows: kernels and twins against loops."""

from __future__ import annotations

import pytest
import torch
from moe_core.errors import ConfigError, TensorError
from moe_core.kernels.ops.permute import assign_slots, batch_tokens, gather_rows, scatter_rows

BACKENDS = ["torch", "triton"]
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.float64]


def rows_of(rows, columns, dtype, device, seed=0):
    """Arbitrary bits."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (rows, columns * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.to(device).view(dtype)


def bits(x):
    return x.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather(dtype, backend, device):
    x = rows_of(6, 37, dtype, device)
    scale = torch.rand(2, 6, device=device).T
    index = torch.tensor([11, 0, -1, 5, 12, 3, -(2**31), 2**31 - 1, 4], dtype=torch.int32, device=device)
    out, out_scale = gather_rows(x, index, per_row=2, scale=scale, backend=backend)
    for p, i in enumerate(index.tolist()):
        if 0 <= i < 12:
            assert torch.equal(bits(out[p]), bits(x[i // 2]))
            assert torch.equal(out_scale[p], scale[i // 2])
        else:
            assert not bits(out[p]).any()
            assert not out_scale[p].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [0, 3, 5])
def test_gather_the_first_rows(count, backend, device):
    x = torch.randn(4, 300, device=device)
    index = torch.tensor([3, 2**40, 1, 0, 2], device=device)
    out = torch.full((5, 302), 9.0, device=device)[:, 1:301]
    given, none = gather_rows(
        x, index, count=torch.tensor([count], dtype=torch.int32, device=device), out=out, backend=backend
    )
    assert given is out
    assert none is None
    want = torch.stack([x[3], torch.zeros_like(x[0]), x[1], x[0], x[2]])
    assert torch.equal(out[:count], want[:count])
    assert (out[count:] == 9.0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_inverts_gather(dtype, backend, device):
    x = rows_of(40, 130, dtype, device)
    scale = torch.randint(0, 255, (40, 5), dtype=torch.uint8, device=device)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).to(device)
    there, there_scale = gather_rows(x, order, scale=scale, backend=backend)
    back, back_scale = scatter_rows(there, order, num_rows=40, scale=there_scale, backend=backend)
    assert torch.equal(bits(back), bits(x))
    assert torch.equal(back_scale, scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scatter(backend, device):
    y = torch.randn(3, 8, device=device)
    index = torch.tensor([4, -1, 7, 0, 5, -9], dtype=torch.int32, device=device)
    out, _ = scatter_rows(y, index, num_rows=5, per_row=2, backend=backend)
    zero = torch.zeros_like(y[0])
    assert torch.equal(out, torch.stack([y[1], zero, zero, zero, y[0]]))
    kept = torch.full((5, 8), 2.0, device=device)
    count = torch.tensor([3], dtype=torch.int32, device=device)
    scatter_rows(y, index, num_rows=5, per_row=2, count=count, out=kept, backend=backend)
    two = torch.full_like(zero, 2.0)
    assert torch.equal(kept, torch.stack([two, two, two, two, y[0]]))


def slots_by_loop(ids, num_experts, max_tokens, expert_map):
    places, counts = [], [0] * num_experts
    for i in ids.flatten().tolist():
        e = i
        if expert_map is not None:
            e = expert_map[i].item() if 0 <= i < len(expert_map) else -1
        if not 0 <= e < num_experts or counts[e] == max_tokens:
            places.append(-1)
            continue
        places.append(e * max_tokens + counts[e])
        counts[e] += 1
    return places, counts


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("tokens", "top_k", "experts", "max_tokens"), [(5, 2, 4, 10), (33, 3, 7, 4), (1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slots(dtype, tokens, top_k, experts, max_tokens, mapped, backend, device):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts + 2, (tokens, top_k), generator=generator).to(dtype)
    if dtype is torch.int64:
        ids[0, 0] = 2**32  # 0 in its low half
    expert_map = None
    if mapped:
        expert_map = torch.randint(-1, experts + 1, (experts + 1,), generator=generator, dtype=torch.int32)
    places, counts = assign_slots(
        ids.to(device),
        num_experts=experts,
        max_tokens=max_tokens,
        expert_map=None if expert_map is None else expert_map.to(device),
        backend=backend,
    )
    want_places, want_counts = slots_by_loop(ids, experts, max_tokens, expert_map)
    assert places.dtype is counts.dtype is torch.int32
    assert places.flatten().tolist() == want_places
    assert counts.tolist() == want_counts


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_pairs_than_a_block(backend, device):
    ids = torch.arange(3000, device=device).remainder(3).view(1500, 2)
    places, counts = assign_slots(ids, num_experts=3, max_tokens=2000, backend=backend)
    assert counts.tolist() == [1000, 1000, 1000]
    assert places.flatten().tolist() == [(i % 3) * 2000 + i // 3 for i in range(3000)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_batched_tokens_and_back(backend, device):
    x = rows_of(9, 50, torch.bfloat16, device)
    scale = torch.rand(9, 2, device=device)
    ids = torch.tensor([[0, 3], [3, 1], [3, 0], [-1, 3], [3, 4], [1, 3], [0, 1], [3, 2], [3, 0]], device=device)
    out = torch.full((4, 6, 50), 1.0, dtype=torch.bfloat16, device=device)
    batched = batch_tokens(x, ids, num_experts=4, max_tokens=6, scale=scale, out=out, backend=backend)
    assert batched.hidden_states is out
    assert batched.expert_num_tokens.tolist() == [4, 3, 1, 6]
    flat, flat_scale = out.view(24, 50), batched.scale.view(24, 2)
    used = torch.zeros(24, dtype=torch.bool)
    for m in range(9):
        for j in range(2):
            place = batched.places[m, j].item()
            if place >= 0:
                used[place] = True
                assert place // 6 == ids[m, j]
                assert torch.equal(bits(flat[place]), bits(x[m]))
                assert torch.equal(flat_scale[place], scale[m])
    assert used.sum() == 14
    assert (flat[~used.to(device)] == 1.0).all()
    back, _ = gather_rows(flat, batched.places.view(-1), backend=backend)
    assert torch.equal(bits(back[0]), bits(x[0]))
    assert not bits(back[6]).any()  # (3, 0): no expert
    assert not bits(back[15:17]).view(2, -1)[1].any()  # (8, 0): its expert is full


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing(backend, device):
    x = torch.randn(0, 8, device=device)
    batched = batch_tokens(
        x, torch.empty(0, 2, dtype=torch.int32, device=device), num_experts=3, max_tokens=4, backend=backend
    )
    assert batched.expert_num_tokens.tolist() == [0, 0, 0]
    assert batched.places.shape == (0, 2)
    index = torch.tensor([0, 1], device=device)
    assert not gather_rows(x, index, backend=backend)[0].any()
    assert gather_rows(torch.randn(3, 8, device=device), index[:0], backend=backend)[0].shape == (0, 8)


def test_wrong_calls(device):
    x, index = torch.randn(3, 4, device=device), torch.zeros(5, dtype=torch.int32, device=device)
    for call, message in (
        (lambda: gather_rows(x.T, index), "column stride 4"),
        (lambda: gather_rows(x, index.float()), "index .*torch.float32"),
        (lambda: gather_rows(x, index, scale=torch.ones(2, 1)), r"scale .*\[2, 1\]"),
        (lambda: gather_rows(x, index, out=torch.ones(5, 3)), r"out .*\[5, 3\]"),
        (lambda: gather_rows(x, index, out=torch.ones(5, 4).half()), "out .*torch.float16"),
        (lambda: gather_rows(x, index, count=index), r"count .*\[5\]"),
        (lambda: scatter_rows(x, index, num_rows=9), "index .*5 entries"),
        (lambda: assign_slots(index, num_experts=1, max_tokens=1), r"topk_ids .*\[5\]"),
        (lambda: batch_tokens(x, index[:4].view(2, 2), num_experts=1, max_tokens=1), r"expected \[3, k\]"),
    ):
        with pytest.raises(TensorError, match=message):
            call()
    with pytest.raises(ConfigError, match="per_row"):
        gather_rows(x, index, per_row=0)
    with pytest.raises(ConfigError, match=r"num_experts 0 x max_tokens 1"):
        assign_slots(index.view(5, 1), num_experts=0, max_tokens=1)
