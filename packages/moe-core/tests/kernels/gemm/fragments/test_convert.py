"""What the family makes of canonical weights: scales with zero points, relative scales, columns by group."""

from __future__ import annotations

import pytest
import torch
from moe_core import TensorError, kInt4Static, kInt4StaticAsym, kInt8Static, kInt8StaticChannelSym
from moe_core.kernels.gemm.fragments.convert import convert_integers
from moe_core.kernels.gemm.fragments.fragment_order import interleave, order_words
from moe_core.kernels.gemm.fragments.scales import order_scales, relative_scales
from moe_core.kernels.gemm.tiles.columns import CHUNK, group_columns


def _codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


def _by_group(pairs: torch.Tensor, groups: int) -> torch.Tensor:
    """[E, groups, rows] of scales in pairs, one after the other."""
    return torch.stack([pairs[:, group // 2, :, group % 2] for group in range(groups)], dim=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("groups", "size"), [(4, 64), (3, 128), (1, 128), (7, 32)])
def test_symmetric_16_bit_scales_of_two_groups_share_a_word(groups: int, size: int, dtype: torch.dtype) -> None:
    scale, columns = torch.randn(2, 24, groups).to(dtype), groups * size
    key = kInt4Static.with_group(1, size)
    found = convert_integers(_codes(2, 24, columns // 2), scale, key, columns)
    assert found.scales.shape == (2, -(-groups // 2), 24, 2)
    assert found.scales.dtype is dtype
    assert found.scales.is_contiguous()
    assert torch.equal(_by_group(found.scales, groups), scale.transpose(1, 2))
    if groups % 2:
        assert not found.scales[:, -1, :, 1].any()
    assert (found.group_size, found.channel_scales, found.index) == (size, None, None)


def test_other_scales_have_four_bytes() -> None:
    codes, scale, zero = _codes(1, 8, 128), torch.rand(1, 8, 2).bfloat16(), torch.zeros(1, 8, 2, dtype=torch.uint8)
    assert convert_integers(codes, scale.float(), kInt4Static, 256).scales.dtype is torch.float32
    assert convert_integers(codes, scale, kInt4StaticAsym, 256, zero_point=zero).scales.dtype is torch.int32
    by_row = convert_integers(codes, scale[:, :, :1], kInt4Static.with_group(1, -1), 256)
    assert by_row.scales.dtype is torch.float32
    # groups of other sizes, which are filled up
    g_idx = torch.zeros(1, 256, dtype=torch.int32)
    g_idx[0, 100:] = 1
    assert convert_integers(codes, scale, kInt4Static, 256, g_idx=g_idx).scales.dtype is torch.float32


def test_relative_scales_stay_bfloat16_and_exact() -> None:
    scale = (torch.randn(2, 8, 3) * torch.exp2(torch.randint(-30, 30, (2, 8, 3)))).bfloat16()
    found = convert_integers(_codes(2, 8, 192), scale, kInt4Static, 384, dtype=torch.float16)
    wide = convert_integers(_codes(2, 8, 192), scale.float(), kInt4Static, 384, dtype=torch.float16)
    assert found.channel_scales is not None
    assert wide.channel_scales is not None
    assert torch.equal(found.channel_scales, wide.channel_scales)
    assert found.scales.dtype is torch.bfloat16
    assert torch.equal(_by_group(found.scales, 3).float(), wide.scales)
    # what is small beside a row's largest is no float16
    half = convert_integers(_codes(2, 8, 192), scale.half(), kInt4Static, 384, dtype=torch.float16)
    assert half.scales.dtype is torch.float32


def test_the_largest_scales_have_a_finite_unit() -> None:
    scale = torch.tensor([[[2.0**127, 2.0**-20], [3.0e38, 0.0]]], dtype=torch.bfloat16).float()
    relative, unit = relative_scales(scale)
    assert unit.tolist() == [[2.0**127, 2.0**127]]
    assert torch.equal(relative * unit[:, :, None], scale)


def test_scales_in_pairs_have_the_powers_of_wide_ones() -> None:
    scale = (torch.randn(4, 8, 3) * 50).bfloat16()
    found, wide = (convert_integers(_codes(4, 8, 192), each, kInt4Static, 384) for each in (scale, scale.float()))
    assert found.powers is not None
    assert wide.powers is not None
    assert torch.equal(found.powers, wide.powers)


def test_powers_are_more_than_half_of_an_expert_s_largest_scale() -> None:
    scale = torch.full((5, 8, 2), 2.0**-20)
    scale[1, 3, 1], scale[2, 0, 0], scale[2, 7, 1] = 1.999, -96.0, 3.0
    scale[3, 2, 0], scale[3, 2, 1], scale[3, 4, 0] = float("inf"), float("nan"), 5.0
    scale[4, 0, 0] = torch.finfo(torch.float32).max
    found = convert_integers(_codes(5, 8, 128), scale, kInt4Static, 256)
    assert found.powers is not None
    # no higher: the other scales of the last expert keep their bits, and 2^7 times the power is finite
    assert found.powers.tolist() == [1.0, 1.0, 64.0, 4.0, 2.0**60]


def test_only_symmetric_groups_in_bfloat16_have_powers() -> None:
    scale, zero = torch.rand(2, 8, 2), torch.zeros(2, 8, 2, dtype=torch.uint8)
    assert convert_integers(_codes(2, 8, 128), scale, kInt4Static, 256, dtype=torch.float16).powers is None
    assert convert_integers(_codes(2, 8, 128), scale, kInt4Static, 256, dtype=torch.float32).powers is None
    assert convert_integers(_codes(2, 8, 128), scale, kInt4StaticAsym, 256, zero_point=zero).powers is None
    assert convert_integers(_codes(2, 8, 256), scale, kInt8Static, 256).powers is None


def test_interleaved_scales_follow_their_rows() -> None:
    for rows in (32, 20):
        scale = torch.randn(2, rows, 2).bfloat16()
        wide = convert_integers(_codes(2, rows, 128), scale.float(), kInt4Static, 256, interleaved=True)
        assert torch.equal(wide.scales, interleave(scale.float()).transpose(1, 2))
        found = convert_integers(_codes(2, rows, 128), scale, kInt4Static, 256, interleaved=True)
        assert torch.equal(_by_group(found.scales, 2), interleave(scale).transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_zero_points_stand_in_the_last_bits(dtype: torch.dtype) -> None:
    scale = torch.randn(2, 8, 2).to(dtype)
    zero = torch.randint(0, 17, (2, 8, 2), dtype=torch.int32)
    zero[0, 0, 0] = 16
    found = convert_integers(_codes(2, 8, 128), scale, kInt4StaticAsym, 256, zero_point=zero).scales
    assert found.dtype is torch.int32
    assert torch.equal((found & 511).transpose(1, 2), zero)
    # 16-bit types have 10 bits of mantissa at most: exact
    assert torch.equal((found & -512).view(torch.float32).transpose(1, 2), scale.float())


def test_float32_scales_beside_zero_points_are_rounded_to_14_bits() -> None:
    scale = torch.rand(1, 64, 2) + 0.5
    zero = torch.zeros(1, 64, 2, dtype=torch.uint8)
    found = convert_integers(_codes(1, 64, 128), scale, kInt4StaticAsym, 256, zero_point=zero).scales
    error = ((found & -512).view(torch.float32).transpose(1, 2) - scale).abs() / scale
    assert 0 < float(error.max()) <= 2**-15


@pytest.mark.parametrize("zero_dtype", [None, torch.uint8, torch.int32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "groups", "interleaved"), [(256, 16, True), (36, 18, True), (131, 1, False)])
def test_scales_lie_by_group(
    rows: int,
    groups: int,
    interleaved: bool,
    dtype: torch.dtype,
    zero_dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(rows)
    scale = torch.randn(2, rows, groups, generator=generator).to(device, dtype)
    kept = scale.clone()
    wide, zero = scale.float(), None
    if zero_dtype is not None:
        zero = torch.randint(0, 256, scale.shape, generator=generator).to(device, zero_dtype)
        wide = (((wide.view(torch.int32) + 256) & -512) | zero).view(torch.float32)
    found = order_scales(scale, zero, interleaved=interleaved)
    expected = (interleave(wide) if interleaved else wide).transpose(1, 2)
    assert found.dtype is (torch.float32 if zero is None else torch.int32)
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.int32), expected.contiguous().view(torch.int32))
    assert torch.equal(scale, kept)


def test_float16_layers_hold_scales_relative_to_a_rows_largest() -> None:
    scale = torch.tensor([[[1e-30, 3e-31], [2e20, 1e20], [0.0, 0.0]]])
    found = convert_integers(_codes(1, 3, 128), scale, kInt4Static, 256, dtype=torch.float16)
    assert found.channel_scales is not None
    relative = found.scales.transpose(1, 2)
    assert torch.equal(relative * found.channel_scales[:, :, None], scale)
    assert float(relative[0, :2].amax(dim=1).min()) >= 0.5
    assert float(relative.max()) < 1


def _value(codes: torch.Tensor, index: torch.Tensor, expert: int) -> torch.Tensor:
    """Canonical words of permuted columns, by hand."""
    columns = index[expert].clamp_min(0).long()
    return codes[expert][:, columns]


@pytest.mark.parametrize(("columns", "count", "size"), [(96, 3, 32), (300, 3, 128), (200, 9, 64), (65, 1, 128)])
def test_columns_by_group(columns: int, count: int, size: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    g_idx = torch.randint(0, count, (3, columns), dtype=torch.int32, generator=generator)
    found = group_columns(g_idx, size, count)
    for expert in range(3):
        places = found.index[expert]
        used = places[places >= 0]
        assert sorted(used.tolist()) == list(range(columns))
        for place, column in enumerate(places.tolist()):
            if column >= 0:
                assert int(found.groups[expert, place // found.group_size]) == int(g_idx[expert, column])
    again = group_columns(g_idx.flip(1), size, count)
    assert again.index.shape == found.index.shape
    assert again.groups.shape == found.groups.shape


def test_whole_groups_are_not_filled_up() -> None:
    order = torch.stack([torch.randperm(300, generator=torch.Generator().manual_seed(e)) for e in range(2)])
    g_idx = torch.zeros(2, 300, dtype=torch.int32)
    g_idx.scatter_(1, order, (torch.arange(300) // 128).int().expand(2, 300).contiguous())
    found = group_columns(g_idx, 128, 3)
    assert found.group_size == 128
    assert found.index.shape == (2, 300)
    assert group_columns(g_idx, 128, 4).group_size == CHUNK


def test_permuted_codes_stand_where_their_index_says() -> None:
    generator = torch.Generator().manual_seed(3)
    codes = _codes(2, 4, 96)
    g_idx = torch.randint(0, 3, (2, 96), dtype=torch.int32, generator=generator)
    scale = torch.rand(2, 4, 3)
    key = kInt8Static.with_group(1, 32)
    found = convert_integers(codes, scale, key, 96, g_idx=g_idx)
    assert found.index is not None
    for expert in range(2):
        taken = _value(codes, found.index, expert)
        assert torch.equal(found.words[expert], order_words(taken[None], taken.shape[1], 8)[0])


@pytest.mark.parametrize("columns", [128, 70])
def test_signed_codes_become_unsigned(columns: int) -> None:
    codes = torch.arange(-128, 128).to(torch.int8).repeat(4)[: 6 * columns].view(1, 6, columns)
    scale = torch.rand(1, 6, 1)
    found = convert_integers(codes, scale, kInt8StaticChannelSym, columns)
    unsigned = (codes.int() + 128).to(torch.uint8)
    words = order_words(torch.nn.functional.pad(unsigned, (0, -columns % 128), value=128), columns + -columns % 128, 8)
    assert torch.equal(found.words, words)
    assert torch.equal(found.scales, scale.transpose(1, 2))


def test_signed_codes_have_a_byte_each() -> None:
    with pytest.raises(TensorError, match="4 bits"):
        convert_integers(_codes(1, 4, 64).view(torch.int8), torch.rand(1, 4, 1), kInt4Static, 128)


def test_other_groups_are_refused() -> None:
    with pytest.raises(TensorError, match="256"):
        convert_integers(_codes(1, 4, 128), torch.rand(1, 4, 1), kInt4Static.with_group(1, 256), 256)


def test_a_rows_largest_scale_is_one_to_which_16_bits_are_exact() -> None:
    scale = torch.tensor([[[1.0 + 2.0**-20, 0.3, -3.7], [0.0, 0.0, 0.0], [float("inf"), 2.0, 1.0]]])
    relative, unit = relative_scales(scale, power_of_two=False)
    assert torch.equal(unit, torch.tensor([[3.7, 1.0, 1.0]]))
    assert relative[0, 0, 2] == -1.0
    assert torch.equal(relative[0, 1:], scale[0, 1:])
