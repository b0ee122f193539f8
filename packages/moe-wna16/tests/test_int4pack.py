"""torch's CPU product of 4-bit weights: its layout, found out and undone, and when it stands back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_core import (
    DeviceInfo,
    FusedMoEConfig,
    KernelWeights,
    QuantKey,
    kFp8DynamicTokenSym,
    kInt4Static,
)
from moe_core.reference.quantization import dequantize_weight
from moe_core.reference.tolerance import expected_output
from moe_core.testing.data import make_inputs, make_weights
from moe_wna16 import int4pack
from moe_wna16.experts.torch import TorchWNA16Experts
from moe_wna16.keys import BASES, SCALE_DTYPES

AVAILABLE = pytest.mark.skipif(not int4pack.available(), reason="this CPU has no product of 4-bit weights in torch")
CONFIG = FusedMoEConfig(8, 2, 256, 128)


def random_codes(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)


def values(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=2).flatten(1).float() - 8


@AVAILABLE
@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (192, 128), (128, 96)])
def test_unpacking_undoes_packing(rows: int, columns: int) -> None:
    codes = random_codes(rows, columns)
    out = torch.empty(columns, rows)
    int4pack.unpack(int4pack.pack(codes, 4, 32)[0], out)
    assert torch.equal(out.T, values(codes))
    out = torch.empty(columns // 2, rows)
    packed, added = int4pack.pack(codes, 8, 16)
    int4pack.unpack(packed, out)
    by_group = codes.float().view(rows, -1, 16)
    assert torch.equal(added.T, 8.0 * (by_group.amax(dim=2) >= 248))
    assert torch.equal(out.T, (by_group - 120 - added.T[:, :, None]).flatten(1))


@AVAILABLE
@pytest.mark.parametrize("dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("base", BASES, ids=lambda key: key.dtype.name)
@pytest.mark.parametrize("tokens", [0, 1, 5, int4pack.MAX_ROWS + 1])
def test_product(tokens: int, base: QuantKey, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4pack, "_BLOCK", 256 * 64 * 2)  # two tiles of three, then one
    rows, columns, bits = 192, 256, base.dtype.bits
    generator = torch.Generator().manual_seed(2)
    # all of one sign, as after some activations: what a zero lacks adds up
    x = torch.rand(tokens, columns, generator=generator).bfloat16().float()
    codes = random_codes(rows, columns * bits // 4)
    for group in (*int4pack.GROUPS, -1):
        groups = 1 if group < 0 else columns // group
        scale = torch.randn(rows, groups, generator=generator).to(dtype)
        zero_point = None
        if not base.symmetric:
            zero_point = torch.randint(0, 2**bits + 1, (rows, groups), generator=generator, dtype=torch.int32)
        size = int4pack.group_of(group, rows, columns)
        assert size is not None
        packed, added = int4pack.pack(codes, bits, size)
        passes = int4pack.scales_and_zeros(scale, zero_point, bits, added)
        found = int4pack.product(x, packed, passes)
        key = base.with_group(1, group).with_scale_dtype(dtype)
        (w,) = dequantize_weight(
            codes[None],
            scale[None],
            key,
            zero_point=None if zero_point is None else zero_point[None],
            dtype=torch.float64,
        )
        expected = x.double() @ w.T
        # float32 sums; each pass's rounding to bfloat16, of which int8's second is up to a share of the codes;
        # what passes leave out of a scale: 2**-18 of it times codes
        spread = x.double().abs() @ (scale.double().abs().repeat_interleave(columns // groups, dim=1)).T
        part = 8 * spread if bits == 8 else 0 * spread
        limit = 2.0**-8 * (expected.abs() + part) + 2.0**-18 * 2**bits * spread
        assert bool(((found.double() - expected).abs() <= limit).all()), group


@AVAILABLE
def test_passes() -> None:
    """One where bfloat16 holds everything; memory is read once for each."""
    scale, zero_point = torch.ones(64, 2), torch.ones(64, 2, dtype=torch.int32)
    for bits, dtype, asymmetric, expected in (
        (4, torch.bfloat16, False, 1),
        (4, torch.float16, False, 2),
        (4, torch.bfloat16, True, 2),
        (4, torch.float32, True, 2),
        (8, torch.bfloat16, False, 2),
        (8, torch.bfloat16, True, 2),
        (8, torch.float16, False, 4),
    ):
        found = int4pack.scales_and_zeros(scale.to(dtype), zero_point if asymmetric else None, bits, torch.zeros(2, 64))
        assert found.shape == (expected, 2, 64, 2)


def test_what_the_layout_holds() -> None:
    assert [int4pack.group_of(g, 128, 256) for g in (128, 64, 32, -1, 16)] == [128, 64, 32, 128, None]
    assert int4pack.group_of(128, 128, 192) is None
    assert int4pack.group_of(-1, 128, 192) == 64
    assert int4pack.group_of(32, 96, 256) is None


@AVAILABLE
@pytest.mark.parametrize("code", [0, 113, 127, 128, 129, 247, 248, 255])
def test_codes_that_are_all_alike(code: int) -> None:
    """Nothing large cancels: what is left of small codes has bfloat16's own error."""
    codes = torch.full((64, 128), code, dtype=torch.uint8)
    scale, x = torch.full((64, 1), 1.0).bfloat16(), torch.rand(3, 128).bfloat16().float()
    packed, added = int4pack.pack(codes, 8, 128)
    found = int4pack.product(x, packed, int4pack.scales_and_zeros(scale, None, 8, added))
    expected = (code - 128) * x.double().sum(dim=1, keepdim=True).expand(3, 64)
    assert bool(((found.double() - expected).abs() <= 2.0**-7 * expected.abs()).all())


@pytest.mark.parametrize("columns", [1, 31, 64, 200])
def test_blocks_of_columns(columns: int) -> None:
    """Every column once, in a block of its group; as many blocks whatever the groups are."""
    generator, counts = torch.Generator().manual_seed(columns), set()
    for g_idx in (
        torch.zeros(columns).int(),
        torch.full((columns,), 4).int(),
        torch.arange(columns).int() % 5,
        torch.randint(0, 5, (columns,), generator=generator).int() // 2 * 2,
    ):
        order, of_block = int4pack.column_blocks(g_idx, 5)
        counts.add(len(of_block))
        assert len(order) == 32 * len(of_block)
        held = order < columns
        assert order[held].sort().values.tolist() == list(range(columns))
        assert torch.equal(of_block.repeat_interleave(32)[held], g_idx[order[held].long()].long())
    assert len(counts) == 1


@AVAILABLE
@pytest.mark.parametrize("base", BASES, ids=lambda key: key.dtype.name)
@pytest.mark.parametrize("sizes", [(256, 128), (320, 96), (192, 63)])
def test_layers_of_permuted_columns(base: QuantKey, sizes: tuple[int, int]) -> None:
    """Also of sizes that the product's groups don't divide; the last ones have rows that it does not take."""
    config = FusedMoEConfig(4, 2, *sizes)
    for group in (32, 128, -1):
        key = replace(base.with_group(1, group), permuted=True)
        weights = make_weights(config, key, None, seed=0)
        made = TorchWNA16Experts(config, weight_key=key, activation_key=None, device=DeviceInfo.parse("cpu"))
        found = made.convert(weights)
        assert found.w2.dim() == (5 if config.w13_rows % 64 == 0 else 3)
        for tokens in (5, 150):
            inputs, output = make_inputs(config, tokens, seed=1), torch.empty(tokens, sizes[0], dtype=torch.bfloat16)
            routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
            made.apply(output, inputs.x, found, **routed, workspace={})
            expected_output(inputs.x, weights, config, **routed).compare(output, f"{key}")


def test_another_layout_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPUs with other instructions: nothing is packed then."""

    def unpack(packed: torch.Tensor, out: torch.Tensor) -> None:
        int4pack_unpack(packed.roll(1, dims=3), out)

    int4pack_unpack = int4pack.unpack
    monkeypatch.setattr(int4pack, "unpack", unpack)
    assert not int4pack.available.__wrapped__()


def test_a_product_that_fails_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("not implemented on this CPU")

    monkeypatch.setattr(int4pack, "product", fails)
    assert not int4pack.available.__wrapped__()


def converted(
    config: FusedMoEConfig, weight_key: QuantKey, activation_key: QuantKey | None = None, device: str = "cpu"
) -> KernelWeights:
    made = TorchWNA16Experts(
        config, weight_key=weight_key, activation_key=activation_key, device=DeviceInfo.parse(device)
    )
    return made.convert(make_weights(config, weight_key, activation_key, seed=0))


@AVAILABLE
def test_which_layers_are_packed() -> None:
    def is_packed(weights: KernelWeights) -> bool:
        assert weights.w13.dtype is torch.uint8
        return weights.w13.dim() == 5

    def layer(hidden: int, inter: int, dtype: torch.dtype = torch.bfloat16) -> FusedMoEConfig:
        return FusedMoEConfig(8, 2, hidden, inter, dtype=dtype)

    for base in BASES:
        for group in (32, 64, 128, -1):
            assert is_packed(converted(CONFIG, base.with_group(1, group)))
        assert is_packed(converted(CONFIG, replace(base, permuted=True)))
    assert is_packed(converted(CONFIG, replace(kInt4Static.with_scale_dtype(torch.float16), pre_scaled=True)))
    for config, weight_key, activation_key, device in (
        (layer(256, 128, torch.float16), kInt4Static, None, "cpu"),
        (layer(256, 128, torch.float32), kInt4Static, None, "cpu"),
        (layer(200, 128), kInt4Static, None, "cpu"),
        (layer(256, 96), kInt4Static, None, "cpu"),
        (CONFIG, kInt4Static, kFp8DynamicTokenSym, "cpu"),
        (CONFIG, kInt4Static, None, "sm90"),
    ):
        assert not is_packed(converted(config, weight_key, activation_key, device))


def test_without_the_product_the_layer_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4pack, "available", lambda: False)
    weights = make_weights(CONFIG, kInt4Static, None, seed=0)
    made = TorchWNA16Experts(CONFIG, weight_key=kInt4Static, activation_key=None, device=DeviceInfo.parse("cpu"))
    found = made.convert(weights)
    assert found.w13 is weights.w13
    inputs, output = make_inputs(CONFIG, 9, seed=1), torch.empty(9, 256, dtype=torch.bfloat16)
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    made.apply(output, inputs.x, found, **routed, workspace={})
    expected_output(inputs.x, weights, CONFIG, **routed).compare(output, "without the product")
