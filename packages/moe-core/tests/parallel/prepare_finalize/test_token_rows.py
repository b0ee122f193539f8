"""Tokens as rows of bytes: what they take, and that they come back."""

from __future__ import annotations

import pytest
import torch
from moe_core import kFp8Dynamic128Sym, kInt8DynamicTokenSym, kMxfp8Dynamic
from moe_core.kernels.ops.quantize import quantize_activation
from moe_core.parallel.prepare_finalize.token_rows import Tokens
from moe_core.spec.quant_key import QuantKey


def tokens(key: QuantKey | None, count: int = 3, columns: int = 384, top_k: int = 2, adapters: bool = False) -> Tokens:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, columns, generator=generator).to(torch.bfloat16)
    codes, scale = (x, None) if key is None else quantize_activation(x, key)
    weights = torch.rand(count, top_k, generator=generator)
    ids = torch.randint(-1, 9, (count, top_k), generator=generator).int()
    return Tokens(codes, scale, weights, ids, torch.arange(count, dtype=torch.int32) if adapters else None)


@pytest.mark.parametrize(
    ("key", "nbytes"),
    [
        (None, 768),
        # codes take half the bytes; scales 4 or 1 each, in whole 16 bytes
        (kFp8Dynamic128Sym, 384 + 16),
        (kInt8DynamicTokenSym, 384 + 16),
        (kMxfp8Dynamic, 384 + 16),
    ],
)
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_rows_come_back_as_they_were(key: QuantKey | None, nbytes: int, top_k: int) -> None:
    for count, adapters in ((3, False), (1, True), (0, True)):
        left = tokens(key, count, top_k=top_k, adapters=adapters)
        rows = left.pack()
        routing = 2 * 16 * -(-top_k // 4)
        assert tuple(rows.shape) == (count, nbytes + routing + 16 * adapters)
        assert left.row_nbytes() == rows.shape[1]
        found = left.unpack(rows)
        for mine, other in zip(left.parts(), found.parts(), strict=True):
            assert mine.dtype is other.dtype
            assert torch.equal(mine.view(torch.uint8), other.contiguous().view(torch.uint8))
        rows[:, left.expert_bytes()] = 255
        assert bool((left.unpack(rows).experts == -1).all())
        assert torch.equal(left.unpack(rows).weights, left.weights)


def test_widths_that_are_no_whole_vectors_are_filled_up() -> None:
    left = tokens(None, columns=5)
    assert left.row_nbytes() == 16 + 16 + 16
    assert torch.equal(left.unpack(left.pack()).hidden_states, left.hidden_states)
