"""The sum over top-k: the kernel against its twin and float64."""

from __future__ import annotations

import pytest
import torch
from moe_core.kernels.ops.reduce import reduce_pairs, reduce_pairs_torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("tokens", "top_k", "columns"), [(1, 1, 8), (5, 3, 200), (3, 8, 1100)])
def test_reduce(tokens, top_k, columns, weighted, dtype, device):
    generator = torch.Generator().manual_seed(tokens)
    y = torch.randn(tokens * top_k, columns, generator=generator).to(dtype).to(device)
    ids = torch.randint(-1, 6, (tokens, top_k), generator=generator, dtype=torch.int32).to(device)
    weights = torch.rand(tokens, top_k, generator=generator).to(device) if weighted else None
    known = (ids >= 0) & (ids < 5)
    # what no expert computed must not be read, and router weights of pairs without an expert are anything
    y[~known.flatten()] = float("nan")
    given = None if weights is None else torch.where(known, weights, float("nan"))
    out = torch.full((tokens, columns), float("nan"), dtype=dtype, device=device)
    reduce_pairs(y, ids, 5, out, topk_weights=given)
    assert torch.equal(out, reduce_pairs_torch(y, ids, 5, torch.empty_like(out), topk_weights=weights))
    terms = torch.where(known[..., None], y.view(tokens, top_k, columns).double(), 0.0)
    exact = (terms if weights is None else terms * weights[..., None]).sum(1)
    # top_k + 1 roundings of float32 on the sum of magnitudes, then one to the output
    bound = terms.abs().sum(1) * (top_k + 1) * 2**-24 + exact.abs() * torch.finfo(dtype).eps / 2
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("split", [2, 4])
def test_parts(split, device):
    generator = torch.Generator().manual_seed(split)
    parts = torch.randint(-8, 9, (6, split, 40), generator=generator).float().to(device)
    ids = torch.zeros(3, 2, dtype=torch.int32, device=device)
    out = torch.empty(3, 40, device=device)
    reduce_pairs(parts.view(-1, 40), ids, 1, out, split_k=split)
    assert torch.equal(out, parts.view(3, -1, 40).sum(1))


def test_expert_map(device):
    y = torch.ones(4, 16, device=device)
    ids = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device)
    expert_map = torch.tensor([-1, 0, -1, 1], dtype=torch.int32, device=device)
    out = torch.empty(2, 16, device=device)
    reduce_pairs(y, ids, 2, out, expert_map=expert_map)
    assert torch.equal(out, torch.ones_like(out))
    expert_map[3] = 2
    reduce_pairs(y, ids, 2, out, expert_map=expert_map)
    assert out[0].eq(1).all()
    assert out[1].eq(0).all()


def test_no_tokens(device):
    out = torch.empty(0, 16, device=device)
    ids = torch.empty(0, 2, dtype=torch.int32, device=device)
    assert reduce_pairs(torch.empty(0, 16, device=device), ids, 2, out) is out
