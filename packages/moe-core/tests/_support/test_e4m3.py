"""Codes decoded by table are torch's own values."""

from __future__ import annotations

import pytest
import torch
from moe_core._support import e4m3 as _e4m3
from moe_core._support.e4m3 import decode_e4m3
from torch import Tensor


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize("shape", [(256, 256), (3, 64, 70), (1, 5001), (0, 7), (2, 3)])
def test_every_code_has_its_value(shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel()
    # all pairs of codes occur in the first shape
    raw = torch.cartesian_prod(torch.arange(256), torch.arange(256)).flatten()
    codes = raw.repeat(-(-count // len(raw)) + 1)[:count].to(torch.uint8).view(torch.float8_e4m3fn).view(shape)
    values = decode_e4m3(codes)
    assert values.dtype is torch.float32
    assert torch.equal(bits(values), bits(codes.float()))


def test_what_the_table_can_not_read_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(64).view(torch.float8_e4m3fn).view(64, 256)
    expected = codes.float()
    assert torch.equal(decode_e4m3(codes[:, :128]).nan_to_num(), expected[:, :128].nan_to_num())
    odd = codes.flatten()[1:]
    assert torch.equal(decode_e4m3(odd).nan_to_num(), expected.flatten()[1:].nan_to_num())
    assert torch.equal(decode_e4m3(codes.T).nan_to_num(), expected.T.nan_to_num())

    def no_table() -> Tensor:
        raise AssertionError("the table was read")

    monkeypatch.setattr(_e4m3, "_pairs", no_table)
    decode_e4m3(odd)
    with pytest.raises(AssertionError, match="table"):
        decode_e4m3(codes)
