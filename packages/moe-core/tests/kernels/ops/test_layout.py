"""Layouts of expert weights: against plain indexing, for every word width, and never more memory than stated."""

from __future__ import annotations

import pytest
import torch
from moe_core.errors import TensorError
from moe_core.kernels.ops import layout
from moe_core.kernels.ops.layout import (
    block_major,
    by_experts,
    interleave_halves,
    pad_matrices,
    permute_rows,
    swap_halves,
)
from torch import Tensor

DTYPES = [torch.float8_e4m3fn, torch.uint8, torch.bfloat16, torch.float32, torch.int32]
#: columns whose bytes are moved in words of 16, 8, 4, 2 and 1
COLUMNS = [64, 24, 12, 6, 7]


def weights(dtype: torch.dtype, *shape: int) -> Tensor:
    """Random bits, NaNs among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=torch.Generator().manual_seed(0))
    return raw.to(torch.uint8).view(dtype)


def bits(w: Tensor) -> Tensor:
    return w.contiguous().view(torch.uint8)


@pytest.fixture(params=[False, True], ids=["allocated", "given"])
def given(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def place(given: bool, like: Tensor, *shape: int) -> Tensor | None:
    return torch.empty(shape, dtype=like.dtype, device=like.device) if given else None


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(dtype: torch.dtype, columns: int, given: bool, device: torch.device) -> None:
    w = weights(dtype, 3, 8, columns).to(device)
    before, raw = bits(w).clone(), w.view(torch.uint8).view(3, 8, columns, -1)
    out = place(given, w, 3, 8, columns)
    swapped = swap_halves(w, out=out)
    assert out is None or swapped is out
    assert torch.equal(bits(swapped), bits(torch.cat([raw[:, 4:], raw[:, :4]], 1)).view(3, 8, -1))
    turns = interleave_halves(w, group=2, out=place(given, w, 3, 8, columns))
    assert torch.equal(bits(turns), bits(raw[:, [0, 1, 4, 5, 2, 3, 6, 7]]).view(3, 8, -1))
    index = torch.tensor([7, 0, 0, 5, 2], device=device)
    rows = permute_rows(w, index, out=place(given, w, 3, 5, columns))
    assert torch.equal(bits(rows), bits(raw[:, index]).view(3, 5, -1))
    each = torch.stack([index, index.flip(0), index + 0]).int()
    rows = permute_rows(w, each, out=place(given, w, 3, 5, columns))
    assert torch.equal(bits(rows), bits(torch.stack([raw[e, each[e].long()] for e in range(3)])).view(3, 5, -1))
    if columns % 2 == 0:
        half = columns // 2
        major = block_major(w, half, out=place(given, w, 3, 2, 8, half))
        assert torch.equal(bits(major), bits(raw.view(3, 8, 2, half, -1).transpose(1, 2)).view(3, 2, 8, -1))
        both = block_major(w, half, index=index, out=place(given, w, 3, 2, 5, half))
        assert torch.equal(bits(both), bits(major)[:, :, index])
    padded = pad_matrices(w, 5, columns + 2, parts=2, out=place(given, w, 3, 10, columns + 2))
    halves = padded.view(torch.uint8).view(3, 2, 5, columns + 2, -1)
    assert torch.equal(halves[:, :, :4, :columns], raw.view(3, 2, 4, columns, -1))
    assert not bool(halves[:, :, 4:].any())
    assert not bool(halves[:, :, :, columns:].any())
    assert torch.equal(bits(w), before)


def test_rows_that_lie_apart() -> None:
    w = weights(torch.float8_e4m3fn, 3, 8, 35)[:, :, 3:]
    raw = bits(w)
    assert torch.equal(bits(permute_rows(w, torch.arange(7, -1, -1))), raw.flip(1))
    assert torch.equal(bits(swap_halves(w)), torch.cat([raw[:, 4:], raw[:, :4]], 1))
    assert torch.equal(bits(block_major(w, 16)), raw.view(3, 8, 2, 16).transpose(1, 2))


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_nothing_to_move(shape: tuple[int, int, int]) -> None:
    w = torch.zeros(shape)
    assert tuple(swap_halves(w).shape) == shape
    assert tuple(interleave_halves(w).shape) == shape
    assert tuple(permute_rows(w, torch.arange(shape[1])).shape) == shape
    assert tuple(block_major(w, 4).shape) == (shape[0], shape[2] // 4, shape[1], 4)
    assert tuple(pad_matrices(w, 4, 8).shape) == (shape[0], 4, 8)


def test_steps_share_the_memory_of_some_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weights(torch.uint8, 33, 8, 64)
    index, seen = torch.arange(7, -1, -1), []

    def step(some: Tensor, out: Tensor) -> None:
        seen.append(some.shape[0])
        block_major(permute_rows(some, index), 16, out=out)

    out = by_experts(step, w, torch.empty(33, 4, 8, 16, dtype=torch.uint8))
    assert seen == [2] * 16 + [1]
    assert torch.equal(out, w.flip(1).view(33, 8, 4, 16).transpose(1, 2))
    monkeypatch.setattr(layout, "CHUNK_BYTES", 2 * 8 * 64 - 1)
    by_experts(step, w, out)
    assert seen[17:] == [1] * 33


@pytest.mark.gpu
def test_a_converted_layer_exists_once_beside_its_source() -> None:
    """Peak memory above the source stays under 1.1 of it, the result included."""
    w = torch.zeros(64, 4096, 7168, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    index = torch.arange(4095, -1, -1, device="cuda")
    steps = {
        "swap": lambda: swap_halves(w),
        "interleave": lambda: interleave_halves(w),
        "permute": lambda: permute_rows(w, index),
        "blocks": lambda: block_major(w, 128),
        "rows and blocks": lambda: block_major(w, 128, index=index),
        "step by step": lambda: by_experts(
            lambda some, out: block_major(permute_rows(some, index), 128, out=out),
            w,
            torch.empty(64, 56, 4096, 128, dtype=w.dtype, device="cuda"),
        ),
    }
    for name, step in steps.items():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = step()
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
        del made
        assert extra < 1.1 * w.numel(), f"{name}: {extra / w.numel():.3f} of the weights"


def test_what_is_refused() -> None:
    w = torch.zeros(2, 6, 8)
    for call, message in (
        (lambda: swap_halves(w[:, :5]), r"w .*\[2, 5, 8\]"),
        (lambda: interleave_halves(w, group=2), "multiple of 2"),
        (lambda: permute_rows(w, torch.zeros(3, 6, dtype=torch.int64)), r"index .*shape"),
        (lambda: permute_rows(w, torch.zeros(6)), "index .*torch.float32"),
        (lambda: block_major(w, 3), "w .*8 columns"),
        (lambda: block_major(w, 4, index=torch.zeros(2, 6, dtype=torch.int64)), r"index .*shape"),
        (lambda: pad_matrices(w, 5, 8), "5x8"),
        (lambda: swap_halves(w, out=torch.zeros(2, 6, 7)), "out .*shape"),
        (lambda: swap_halves(w, out=torch.zeros(2, 8, 6).mT), "out .*strides"),
        (lambda: swap_halves(w, out=w), r"\bout .*\bw\b"),
        (lambda: by_experts(lambda a, b: None, w, torch.zeros(3, 1)), r"expected \[2, ...\]"),
    ):
        with pytest.raises(TensorError, match=message):
            call()
