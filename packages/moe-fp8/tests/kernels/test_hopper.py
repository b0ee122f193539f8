"""The warp-specialized kernel's products, by themselves, against float64 over the same e4m3 values.

Tolerances (relative, Frobenius).  A sum in the tensor cores loses up to 2^-13 of its size in every step of 32 columns
(seen: 1.3e-3 after 128 steps, 2.9e-3 after 448), which is less than 2^-10 for the lengths here; rounding to 16 bits
adds 2^-9 at most, rounding to e4m3 an error that is uniform within half a step of at most 2^-3.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core.kernels.gemm.fused.call import Call
from moe_core.kernels.gemm.plan import TileConfig, TilePlan
from moe_core.kernels.gemm.sm90.launch import TILE
from moe_core.kernels.gemm.tiles.launch import GemmWeight, WarpSpecializedGemm
from moe_core.kernels.ops.batch import Batch
from moe_core_managed import managed_copy
from moe_fp8_products import CONFIG, COUNTS, SHORT, Product, no_tiles

WIDE, NARROW = 2**-9 + 2**-10, 2**-4 / 3**0.5 + 2**-10


@pytest.fixture
def hopper(device):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is Hopper's own")
    return device


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "swigluoai", "relu2_no_mul"])
def test_up_products(name, hopper):
    Product(hopper, "blocks", name, out="groups", width=512, bias=True).check(NARROW)
    Product(hopper, "rows", name, out="static").check(NARROW)
    Product(hopper, "tensor", name, bias=True, width=512, weight=1).check(WIDE)


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["blocks", "rows", "tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_down_products(scales, dtype, hopper):
    Product(hopper, scales, None, dtype=dtype, weight=2, bias=True, columns=528, depth=400).check(WIDE)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(64, 64), (128, 64), (64, 128)], ids="{0[0]}x{0[1]}".format)
def test_smaller_blocks(block, hopper):
    out = "groups" if block[1] == TILE else "groups_64"
    for name in ("silu", "relu2_no_mul"):
        Product(hopper, "blocks", name, block=block, out=out, columns=448, width=448, bias=True).check(NARROW)
        Product(hopper, "blocks", name, block=block, out=out, width=512).check(NARROW)
    # a second block that has one row of scales, or lies beyond the last column
    for columns in (336, 304, 256, 64):
        Product(hopper, "blocks", None, block=block, columns=columns, depth=464).check(WIDE)
    Product(hopper, "blocks", None, block=block, capacity=310, depth=448).check(WIDE)


@pytest.mark.gpu
def test_batched_rows(hopper):
    Product(hopper, "rows", "silu", capacity=300).check(WIDE)
    Product(hopper, "blocks", None, capacity=310, columns=336).check(WIDE)


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [None, 300])
@pytest.mark.parametrize("scales", ["blocks", "rows"])
@pytest.mark.parametrize("name", ["silu", "relu2_no_mul", None])
def test_short_tiles_change_no_bit(name, scales, capacity, hopper):
    # an odd number of column blocks: the last of a short tile has no neighbor
    for columns in (640, 128):
        found = []
        for config in (CONFIG, SHORT):
            product = Product(hopper, scales, name, columns=columns, capacity=capacity)
            product.result.out.view(torch.uint8).fill_(0x7F)
            product.run(config)
            assert int(product.order.tiles[1]) == 0
            found.append(product.result.out.view(torch.uint8))
        assert torch.equal(*found)
        assert not bool((found[0] == 0x7F).all())


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["blocks", "rows"])
@pytest.mark.parametrize("name", ["silu", None])
def test_short_tiles_wait_for_late_weights(name, scales, hopper):
    """Weights of every second column block, one consumer's of a short tile, come late, from the host's memory."""
    columns, depth, block = 4096, 512, TILE if name else 2 * TILE
    found = []
    for config in (CONFIG, SHORT):
        product = Product(hopper, scales, name, columns=columns, depth=depth)
        halves = product.w.view(-1, columns // block, block, depth)
        on_host = torch.zeros(halves.shape[:2], dtype=torch.bool)
        on_host[:, 1::2] = True
        product.given_w = managed_copy(halves, on_host).view(product.w.shape)
        product.result.out.view(torch.uint8).fill_(0x7F)
        product.run(config)
        found.append(product.result.out.view(torch.uint8))
    assert torch.equal(*found)
    assert not bool((found[0] == 0x7F).all())


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["blocks", "rows", "tensor"])
def test_more_tiles_than_programs(scales, hopper):
    """Programs draw all tiles but their first."""
    programs = torch.cuda.get_device_properties(hopper).multi_processor_count
    Product(hopper, scales, None, columns=programs * TILE // 2, depth=272).check(WIDE)


@pytest.mark.gpu
def test_largest_magnitude(hopper):
    product = Product(hopper, "rows", "silu", amax=True)
    product.check(WIDE)
    found = product.result.amax.view(torch.float32)
    assert float(found) == float(product.result.out[: sum(COUNTS)].float().abs().max())


def test_fits():
    special = WarpSpecializedGemm(torch.empty(0), lambda: None, ())
    weights = torch.empty(2, 16, 32, device="meta")
    weight = GemmWeight((weights,), 1, 1, no_tiles, warp_specialized=special)
    call = Call(weight, weight, torch.empty(0), Batch(torch.empty(0), 1), TilePlan(CONFIG, CONFIG), {}, None)
    assert call.warp_specializes(CONFIG, weight)
    assert not call.warp_specializes(CONFIG, replace(weight, arguments=(weights[:, 1:],)))
    assert not call.warp_specializes(TileConfig(128, 128, 4, 4), weight)
    tiles = replace(CONFIG, block_m=64)
    assert not replace(call, plan=TilePlan(tiles, tiles)).warp_specializes(CONFIG, weight)
