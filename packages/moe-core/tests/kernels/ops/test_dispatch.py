"""Tokens packed for an all-to-all, against loops and the quantizer alone."""

from __future__ import annotations

import pytest
import torch
from moe_core import ConfigError, kFp8Dynamic128Sym, kFp8DynamicTensorSym, kFp8DynamicTokenSym, kInt8DynamicTokenSym
from moe_core.kernels.ops.dispatch import count_destinations, held_experts, pack_all, pack_tokens, unpack
from moe_core.kernels.ops.quantize import quantize_activation
from moe_core.kernels.ops.reduce import reduce_pairs
from moe_core.kernels.ops.token_layout import TokenCode, TokenLayout
from moe_core.parallel.placement.tables import ReplicaTables
from moe_core.spec.quant_key import kMxfp8Dynamic
from moe_core_exchange import placement_of, routing

CODES = [
    (None, torch.bfloat16),
    (None, torch.float32),
    (kFp8DynamicTokenSym, torch.bfloat16),
    (kFp8Dynamic128Sym, torch.bfloat16),
    (kMxfp8Dynamic, torch.float16),
    (kInt8DynamicTokenSym, torch.float32),
]


def bits(x):
    return x.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("placed", ["contiguous", "round_robin", "replicated"])
@pytest.mark.parametrize(("tokens", "ids_dtype"), [(0, torch.int32), (21, torch.int32), (37, torch.int64)])
def test_destinations(placed, tokens, ids_dtype, device):
    ranks, copies, experts = 3, 2, 10
    placement = placement_of(placed, experts, ranks)
    tables = ReplicaTables.of(placement, device)
    _, ids = routing(tokens, 4, experts, torch.Generator().manual_seed(tokens), ids_dtype)
    positions, counts = count_destinations(ids.to(device), tables, ranks=ranks * copies, copies=copies, offset=3)
    taken = [0] * ranks * copies
    for token, row in enumerate(ids.tolist()):
        wanted = set()
        for expert in row:
            if 0 <= expert < experts:
                replicas = placement.replicas[expert]
                owner = replicas[(token + 3) % len(replicas)][0]
                wanted |= {owner * copies, owner * copies + 1}
        for rank in range(ranks * copies):
            assert positions[token, rank] == (taken[rank] if rank in wanted else -1)
            taken[rank] += rank in wanted
    assert counts.tolist() == taken


@pytest.mark.parametrize("columns", [256, 136])
@pytest.mark.parametrize(("key", "dtype"), CODES, ids=str)
def test_packed_tokens(key, dtype, columns, device):
    ranks, experts, top_k, tokens = 4, 10, 3, 19
    generator = torch.Generator().manual_seed(columns)
    tables = ReplicaTables.of(placement_of("replicated", experts, ranks), device)
    code = TokenCode(columns, dtype, key)
    x = torch.randn(tokens, columns + 3, generator=generator).to(dtype).to(device)[:, :columns]
    x[4] = 0
    x[5, 7] = float("nan")
    weights, ids = (t.to(device) for t in routing(tokens, top_k, experts, generator, torch.int32))
    adapters = torch.arange(tokens, dtype=torch.int32, device=device)
    positions, counts = count_destinations(ids, tables, ranks=ranks, offset=1)
    rows = int(counts.sum())
    packed, places = pack_tokens(
        x, ids, weights, tables, code, positions, counts, rows=rows, offset=1, adapter_ids=adapters
    )
    layout = TokenLayout.rows(code, top_k, adapters=True)
    hidden, scale = (x, None) if key is None else quantize_activation(x, key, backend="triton")
    owners, local = tables.choose(ids, offset=1)
    row = 0
    for rank in range(ranks):
        for token in range(tokens):
            if not (owners[token] == rank).any():
                assert places[token, rank] == -1
                continue
            assert places[token, rank] == row
            got = packed[row]

            def piece(place, like, got=got):
                return got[place[0] : place[0] + like.numel() * like.element_size()].cpu()

            assert torch.equal(piece(layout.hidden, hidden[token]), bits(hidden[token]))
            if scale is not None:
                assert torch.equal(piece(layout.scale, scale[token]), bits(scale[token]))
            assert torch.equal(piece(layout.weights, weights[token]), bits(weights[token]))
            mine = torch.where(owners[token] == rank, local[token], -1)
            assert torch.equal(piece(layout.experts, mine), bits(mine))
            assert torch.equal(piece(layout.adapters, adapters[token : token + 1]), bits(adapters[token : token + 1]))
            row += 1
    assert row == rows
    # the way back: what came back for the ranks of a token, ranks ascending
    back = torch.randn(rows, columns, generator=generator).to(device)
    output = reduce_pairs(back, places, rows, torch.empty(tokens, columns, device=device), rows=places)
    for token in range(tokens):
        expected = torch.zeros(columns, device=device)
        for rank in range(ranks):
            if places[token, rank] >= 0:
                expected += back[places[token, rank]]
        assert torch.equal(output[token], expected)


@pytest.mark.parametrize(("columns", "top_k", "adapted"), [(256, 1, False), (136, 3, True), (2112, 2, False)])
@pytest.mark.parametrize(("key", "dtype"), CODES, ids=str)
def test_all_tokens_there(key, dtype, columns, top_k, adapted, device):
    ranks, experts, tokens, rows = 3, 10, 35, 40
    generator = torch.Generator().manual_seed(columns)
    tables = ReplicaTables.of(placement_of("replicated", experts, ranks), device)
    code = TokenCode(columns, dtype, key)
    x = torch.randn(tokens, columns, generator=generator).to(dtype).to(device)
    weights, ids = (t.to(device) for t in routing(tokens, top_k, experts, generator, torch.int64))
    adapters = torch.arange(tokens, dtype=torch.int32, device=device) if adapted else None
    packed = pack_all(x, ids, weights, tables, code, rows=rows, offset=1, adapter_ids=adapters)
    hidden, scale = (x, None) if key is None else quantize_activation(x, key, backend="triton")
    owners, local = tables.choose(ids, offset=1)
    for rank in range(ranks):
        found = unpack(packed, code, top_k, adapters=adapted, held=(rank * tables.stride, tables.stride))
        assert torch.equal(bits(found.hidden[:tokens]), bits(hidden))
        assert not bits(found.hidden[tokens:]).any()
        assert torch.equal(found.weights[:tokens], weights)
        assert torch.equal(found.experts[:tokens], torch.where(owners == rank, local, -1))
        held = held_experts(ids, tables, (rank * tables.stride, tables.stride), offset=1)
        assert torch.equal(held, tables.local_ids(ids, rank, offset=1))
        assert (found.experts[tokens:] == -1).all()
        if scale is not None:
            assert torch.equal(bits(found.scale[:tokens]), bits(scale))
        if adapters is not None:
            assert torch.equal(found.adapters[:tokens], adapters)
    numbers = torch.where(owners < 0, -1, owners * tables.stride + local)
    assert torch.equal(unpack(packed, code, top_k, adapters=adapted).experts[:tokens], numbers)


def test_scales_that_tokens_share_are_refused():
    with pytest.raises(ConfigError, match="scales"):
        TokenCode(256, torch.bfloat16, kFp8DynamicTensorSym)
