from __future__ import annotations

import moe_mxfp4.groups
import pytest
import torch
from moe_mxfp4.groups import counting_groups


@pytest.mark.parametrize("step", [1, 5 * 720, 128 << 20], ids=["one", "some", "all"])
@pytest.mark.parametrize("columns", [1440, 96, 100, 33, 2])
def test_groups_of_zeros_do_not_count(
    columns: int, step: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros have either sign; the last group may be a part; however many experts are looked at together."""
    monkeypatch.setattr(moe_mxfp4.groups, "_STEP_BYTES", step)
    generator = torch.Generator().manual_seed(columns)
    numbers = torch.randint(0, 16, (3, 5, columns), generator=generator)
    groups = -(-columns // 32)
    empty = torch.rand(3, 5, groups, generator=generator) < 0.5
    numbers[empty.repeat_interleave(32, 2)[..., :columns]] &= 8
    # the only number of its group is the last column's
    numbers[0, 0] &= 8
    numbers[0, 0, -1] = 1
    expected = torch.stack([part.bitwise_and(7).ne(0).any(2) for part in numbers.split(32, 2)], 2)
    even, odd = numbers[..., 0::2], torch.nn.functional.pad(numbers, (0, columns % 2))[..., 1::2]
    codes = (even | odd << 4).to(torch.uint8).to(device)
    assert torch.equal(counting_groups(codes, columns).cpu(), expected)
    # an address that is no multiple of eight
    moved = torch.cat((codes.new_zeros(3), codes.flatten()))[3:].view(codes.shape)
    assert torch.equal(counting_groups(moved, columns).cpu(), expected)
