"""The order of codes in words, against the table in the module's docstring, bit by bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from moe_core import ConfigError, TensorError
from moe_core.kernels.gemm.fragments import fragment_order as words
from moe_core.kernels.gemm.fragments.fragment_order import interleave, interleaved_rows, order_words
from torch import Tensor


def _codes(bits: int, *shape: int) -> Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Canonical bytes, even columns in the low four bits."""
    if bits == 8:
        return codes
    even, odd = codes[..., 0::2], codes[..., 1::2]
    return even | torch.nn.functional.pad(odd, (0, even.shape[-1] - odd.shape[-1])) << 4


def _by_row(words: Tensor) -> Tensor:
    """Words [E, steps, rows, words of a step] as [E, rows, words]."""
    return words.transpose(1, 2).flatten(2)


def _expected(codes: Tensor, bits: int) -> Tensor:
    """Words of int codes [rows, whole units], by the table."""
    rows, columns = codes.shape
    unit = {4: 128, 8: 64}[bits]
    words = torch.zeros(rows, columns // unit * 16, dtype=torch.int64)
    for number, t, i, j in itertools.product(range(columns // unit), range(4), range(2), range(2)):
        if bits == 4:
            for u, s in itertools.product(range(4), range(2)):
                column = unit * number + 32 * u + 16 * s + 8 * j + 2 * t + i
                words[:, 16 * number + 4 * t + u] |= codes[:, column].long() << (4 * (2 * s + j) + 16 * i)
        else:
            for s in range(4):
                column = unit * number + 16 * s + 8 * j + 2 * t + i
                words[:, 16 * number + 4 * t + s] |= codes[:, column].long() << (8 * j + 16 * i)
    return torch.where(words >= 2**31, words - 2**32, words).int()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [256, 200, 37])
def test_words_follow_the_table(bits: int, columns: int, backend: str, device: torch.device) -> None:
    codes = _codes(bits, 3, 5, columns)
    found = order_words(_packed(codes, bits).to(device), columns, bits, backend=backend).cpu()
    whole = torch.nn.functional.pad(codes, (0, -columns % 128))
    assert torch.equal(_by_row(found), torch.stack([_expected(one, bits) for one in whole]))
    assert found.shape == (3, -(-columns // 128), 5, 4 * bits)
    assert found.is_contiguous()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_e2m1_is_spread_as_the_table_says(backend: str, device: torch.device) -> None:
    codes = _codes(4, 2, 5, 256)
    packed = _packed(codes, 4).to(device)
    plain = order_words(packed, 256, 4, backend=backend).cpu().long()
    found = order_words(packed, 256, 4, order="e2m1", backend=backend).cpu().long()
    rotations = {0: (0, 0, 0, 0), 1: (4, 4, 4, 4), 2: (10, 10, 10, 10), 3: (6, 14, 14, 14)}
    for p, half in itertools.product(rotations, range(2)):
        code = torch.zeros_like(found)
        for bit, (place, left) in enumerate(zip((6, 7, 8, 15), rotations[p], strict=True)):
            code |= (found >> (place + 16 * half - left) % 32 & 1) << bit
        assert torch.equal(code, plain >> (4 * p + 16 * half) & 15)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_e2m1_for_8_bit_units_follows_the_table(backend: str, device: torch.device) -> None:
    codes = _codes(4, 2, 5, 256).long()
    packed = _packed(codes.to(torch.uint8), 4).to(device)
    found = _by_row(order_words(packed, 256, 4, order="e4m3", backend=backend).cpu()).long()
    for unit, t, u, h, j in itertools.product(range(2), range(4), range(4), range(2), range(4)):
        word = found[:, :, 16 * unit + 4 * t + u]
        number = (word >> (16 * h + 4 * j) & 7) | (word >> (8 * j + 7 - 4 * h) & 1) << 3
        assert torch.equal(number, codes[:, :, 128 * unit + 32 * u + 16 * h + 4 * t + j])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("rows", [32, 26, 6])
def test_halves_in_turns_of_eight(rows: int, backend: str, device: torch.device) -> None:
    codes = _codes(4, 2, rows, 128)
    packed = _packed(codes, 4).to(device)
    plain = _by_row(order_words(packed, 128, 4, backend=backend).cpu())
    found = _by_row(order_words(packed, 128, 4, interleaved=True, backend=backend).cpu())
    assert found.shape[1] == interleaved_rows(rows)
    half, used = rows // 2, set()
    for row in range(half):
        for part in range(2):
            place = row // 8 * 16 + part * 8 + row % 8
            assert torch.equal(found[:, place], plain[:, part * half + row])
            used.add(place)
    rest = [row for row in range(found.shape[1]) if row not in used]
    assert not found[:, rest].any()
    assert torch.equal(found, interleave(plain))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("order", "bits"), words.ARRANGEMENTS)
@pytest.mark.parametrize(("columns", "launches"), [(256, 1), (200, 1), (198, 3)])
def test_rows_of_whole_int32_are_one_launch(
    columns: int,
    launches: int,
    bits: int,
    order: str,
    interleaved: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that do not fill their words too: gpt-oss' have 2880 columns.  Others are filled up, each expert's alone."""
    packed = _packed(_codes(bits, 3, 26, columns), bits)
    expected = order_words(packed, columns, bits, order=order, interleaved=interleaved, backend="torch")
    launched: list[torch.Size] = []
    original = words._launch

    def launch(codes: Tensor, *rest: Any) -> None:
        launched.append(codes.shape)
        original(codes, *rest)

    monkeypatch.setattr(words, "_launch", launch)
    found = order_words(packed.to(device), columns, bits, order=order, interleaved=interleaved, backend="triton")
    assert torch.equal(found.cpu(), expected)
    assert len(launched) == launches


def test_misaligned_and_strided_codes() -> None:
    codes = _codes(8, 2, 4, 129)[:, :, 1:]
    assert torch.equal(order_words(codes, 128, 8), order_words(codes.contiguous(), 128, 8))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 bits"):
        order_words(_codes(4, 1, 1, 64), 128, 3)
    with pytest.raises(ConfigError, match="8 bits.*'e2m1'"):
        order_words(_codes(8, 1, 1, 64), 64, 8, order="e2m1")
    with pytest.raises(
        ConfigError,
        match="'e5m2'",
    ):
        order_words(_codes(4, 1, 1, 64), 128, 4, order="e5m2")
    with pytest.raises(TensorError, match="64 bytes"):
        order_words(_codes(8, 1, 1, 64), 129, 4)
    with pytest.raises(TensorError, match="dtype"):
        order_words(_codes(8, 1, 1, 64).int(), 128, 4)
