"""Tokens pushed between buffers and results pushed back: all ranks' kernels one after another, against loops."""

from __future__ import annotations

import itertools

import pytest
import torch
from moe_core import TensorError, kFp8Dynamic128Sym, kFp8DynamicTokenSym, kInt8DynamicTokenSym
from moe_core.kernels.ops import _dispatch_launch
from moe_core.kernels.ops.exchange import (
    ExchangeShape,
    arrived_tokens,
    await_tokens,
    combine_results,
    push_results,
    push_tokens,
)
from moe_core.kernels.ops.quantize import quantize_activation
from moe_core.kernels.ops.token_layout import TokenCode
from moe_core.parallel.placement.tables import ReplicaTables
from moe_core.spec.quant_key import kMxfp8Dynamic
from moe_core_exchange import buffers_of, placement_of, routing

EXPERTS, TOP_K = 11, 3


def bits(x):
    return x.contiguous().view(torch.uint8).cpu()


def calls(counts, columns, dtype, ids_dtype, device):
    """(x, weights, ids) of each rank."""
    generator = torch.Generator().manual_seed(sum(counts))
    found = []
    for tokens in counts:
        weights, ids = routing(tokens, TOP_K, EXPERTS, generator, ids_dtype)
        x = torch.randn(tokens, columns, generator=generator).to(dtype)
        found.append(tuple(t.to(device) for t in (x, weights, ids)))
    return found


def partial_results(buffer, arrived, columns):
    """What a rank's experts might make of what arrived; rows without an expert are never to be used."""
    rows = buffer.shape.rows
    found = torch.full((rows, columns), float("nan"), dtype=buffer.shape.dtype, device=buffer.memory.device)
    generator = torch.Generator().manual_seed(buffer.rank)
    values = torch.randn(rows, columns, generator=generator).to(found)
    used = (arrived.experts >= 0).any(1)
    return torch.where(used[:, None], values, found)


@pytest.mark.parametrize(
    ("key", "dtype", "columns", "placed", "copies", "counted"),
    [
        (None, torch.bfloat16, 264, "contiguous", 1, True),
        (None, torch.float32, 131, "replicated", 2, False),
        (kFp8DynamicTokenSym, torch.bfloat16, 256, "replicated", 1, True),
        (kFp8Dynamic128Sym, torch.bfloat16, 2304, "round_robin", 1, True),  # in two programs for a token
        (kFp8Dynamic128Sym, torch.bfloat16, 2304, "replicated", 1, False),
        (kMxfp8Dynamic, torch.float16, 160, "replicated", 2, True),
        (kInt8DynamicTokenSym, torch.bfloat16, 136, "replicated", 1, True),
    ],
    ids=str,
)
def test_there_and_back(key, dtype, columns, placed, copies, counted, device, monkeypatch):
    if not counted:  # as many tokens have it: launches of their own signal and wait
        monkeypatch.setattr(_dispatch_launch, "MOST_COUNTED", 0)
    ranks = 4
    shape = ExchangeShape(ranks, 3, columns, TOP_K, dtype)
    buffers = buffers_of(shape, device)
    tables = ReplicaTables.of(placement_of(placed, EXPERTS, ranks // copies), device)
    code = TokenCode(columns, dtype, key)
    # one rank has none, one all it may have; then others
    for number, counts in enumerate([(3, 0, 2, 1), (0, 0, 0, 0), (1, 3, 0, 2)]):
        given = calls(counts, columns, dtype, torch.int32 if number else torch.int64, device)
        places = [
            push_tokens(
                buffer,
                x,
                ids,
                weights,
                tables,
                code,
                copies=copies,
                offset=buffer.rank,
                adapter_ids=torch.arange(len(x), dtype=torch.int32, device=device) + 100 * buffer.rank,
            )
            for buffer, (x, weights, ids) in zip(buffers, given, strict=True)
        ]
        parts = []
        for buffer in buffers:
            await_tokens(buffer, timeout=1)
            arrived = arrived_tokens(buffer, code)
            for source, (x, weights, ids) in enumerate(given):
                owners, local = tables.choose(ids, offset=source)
                mine = torch.where(owners == buffer.rank // copies, local, -1)
                hidden, scale = (x, None) if key is None else quantize_activation(x, key, backend="triton")
                rows = slice(source * 3, source * 3 + len(x))
                assert torch.equal(arrived.experts[rows], mine)
                assert (arrived.experts[source * 3 + len(x) : source * 3 + 3] == -1).all()
                for token in range(len(x)):
                    if (mine[token] >= 0).any():
                        row = source * 3 + token
                        assert torch.equal(bits(arrived.hidden[row]), bits(hidden[token]))
                        assert torch.equal(arrived.weights[row], weights[token])
                        assert arrived.adapters[row] == 100 * source + token
                        if scale is not None:
                            assert torch.equal(bits(arrived.scale[row]), bits(scale[token]))
            parts.append(partial_results(buffer, arrived, columns))
        for buffer, part in zip(buffers, parts, strict=True):
            push_results(buffer, part, arrived_tokens(buffer, code).experts)
        for buffer, (x, _, ids), at in zip(buffers, given, places, strict=True):
            output = torch.full_like(x, float("nan"))
            combine_results(buffer, at, output, timeout=1)
            owners, _ = tables.choose(ids, offset=buffer.rank)
            expected = torch.zeros(x.shape, device=device)
            for token, rank in itertools.product(range(len(x)), range(ranks)):
                if (owners[token] == rank // copies).any():
                    expected[token] += parts[rank][buffer.rank * 3 + token].float()
            assert torch.equal(output, expected.to(dtype))
            assert not buffer.missing
            assert buffer.state.tolist() == [0, 0, number + 1, *[0] * (ranks + 1)]


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("step", [1, 2])
def test_a_rank_that_does_not_come_is_named_and_the_output_is_no_number(step, counted, device, monkeypatch):
    if not counted:
        monkeypatch.setattr(_dispatch_launch, "MOST_COUNTED", 0)
    shape = ExchangeShape(3, 2, 64, TOP_K, torch.float32)
    buffers = buffers_of(shape, device)
    tables = ReplicaTables.of(placement_of("contiguous", EXPERTS, 3), device)
    code = TokenCode(64, torch.float32)
    given = calls((2, 1, 0), 64, torch.float32, torch.int32, device)
    places = {}
    for buffer, (x, weights, ids) in zip(buffers, given, strict=True):
        if step == 2 or buffer.rank != 1:
            places[buffer.rank] = push_tokens(buffer, x, ids, weights, tables, code)
    for rank in (0, 2):
        await_tokens(buffers[rank], timeout=0.01)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert buffers[rank].missing == ([1] if step == 1 else [])
        experts = arrived_tokens(buffers[rank], code).experts
        push_results(buffers[rank], torch.zeros(shape.rows, 64, device=device), experts)
    for rank in (0, 2):
        output = torch.zeros_like(given[rank][0])
        combine_results(buffers[rank], places[rank], output, timeout=0.01)
        assert output.isnan().all()
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert buffers[rank].missing == [1]
        assert buffers[rank].alarm.tolist() == [0, step, 0]


def test_more_tokens_than_there_is_room_for_are_refused(device):
    shape = ExchangeShape(2, 2, 64, TOP_K, torch.float32)
    buffer = buffers_of(shape, device)[0]
    tables = ReplicaTables.of(placement_of("contiguous", EXPERTS, 2), device)
    x, weights, ids = calls((3,), 64, torch.float32, torch.int32, device)[0]
    with pytest.raises(TensorError, match="hidden_states .*3"):
        push_tokens(buffer, x, ids, weights, tables, TokenCode(64, torch.float32))
    with pytest.raises(TensorError, match=r"partial .*\[3, 64\]"):
        push_results(buffer, x, ids)
