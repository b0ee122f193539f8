"""torch's CPU product of 4-bit weights: its layout, found out and undone, and when it stands back."""

from __future__ import annotations

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
    kInt4StaticAsym,
)
from moe_core.testing.data import make_inputs, make_weights
from moe_core.testing.tolerance import expected_output
from moe_wna16 import int4pack
from moe_wna16.experts.torch import TorchWNA16Experts

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
    int4pack.unpack(int4pack.pack(codes), out)
    assert torch.equal(out.T, values(codes))


@AVAILABLE
@pytest.mark.parametrize("group", [*int4pack.GROUPS, -1])
@pytest.mark.parametrize("tokens", [0, 1, 5, int4pack.MAX_ROWS + 1])
def test_product(tokens: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4pack, "_BLOCK", 256 * 64 * 2)  # two tiles of three, then one
    rows, columns = 192, 256
    codes, generator = random_codes(rows, columns), torch.Generator().manual_seed(2)
    groups = 1 if group < 0 else columns // group
    scale = torch.randn(rows, groups, generator=generator).bfloat16()
    x = torch.randn(tokens, columns, generator=generator).bfloat16().float()
    size = int4pack.group_of(group, rows, columns)
    assert size is not None
    found = int4pack.product(x, int4pack.pack(codes), int4pack.scales_and_zeros(scale, size, columns))
    w = values(codes).double() * scale.double().repeat_interleave(columns // groups, dim=1)
    expected = x.double() @ w.T
    # float32 sums, and the rounding to bfloat16
    limit = 2.0**-8 * expected.abs() + 2.0**-23 * columns**0.5 * (x.double().abs() @ w.abs().T)
    assert bool(((found.double() - expected).abs() <= limit).all())


def test_what_the_layout_holds() -> None:
    assert [int4pack.group_of(g, 128, 256) for g in (128, 64, 32, -1, 16)] == [128, 64, 32, 128, None]
    assert int4pack.group_of(128, 128, 192) is None
    assert int4pack.group_of(-1, 128, 192) == 64
    assert int4pack.group_of(32, 96, 256) is None


def test_another_layout_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPUs with other instructions: nothing is packed then."""

    def unpack(packed: torch.Tensor, out: torch.Tensor) -> None:
        int4pack_unpack(packed.roll(1, dims=2), out)

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
        return weights.w13.dim() == 4

    def layer(hidden: int, inter: int, dtype: torch.dtype = torch.bfloat16) -> FusedMoEConfig:
        return FusedMoEConfig(8, 2, hidden, inter, dtype=dtype)

    for group in (32, 64, 128, -1):
        assert is_packed(converted(CONFIG, kInt4Static.with_group(1, group)))
    for config, weight_key, activation_key, device in (
        (layer(256, 128, torch.float16), kInt4Static, None, "cpu"),
        (layer(256, 128, torch.float32), kInt4Static, None, "cpu"),
        (layer(200, 128), kInt4Static, None, "cpu"),
        (layer(256, 96), kInt4Static, None, "cpu"),
        (CONFIG, kInt4Static.with_scale_dtype(torch.float16), None, "cpu"),
        (CONFIG, kInt4StaticAsym, None, "cpu"),
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
