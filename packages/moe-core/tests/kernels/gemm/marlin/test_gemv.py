"""Which activations the kernels without tensor cores can read, and how exact their products in integers are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import TensorError
from moe_core.kernels.gemm.fragments.convert import Converted
from moe_core.kernels.gemm.fragments.fragment_order import order_words
from moe_core.kernels.gemm.marlin.gemv import GemvFunctions, MarlinGemvLayer
from moe_core.kernels.gemm.marlin.integers import int4_bytes, int8_bytes
from moe_core.kernels.gemm.marlin.weight import MarlinMatrix
from moe_core.kernels.gemm.tiles.launch import Activation
from moe_kit.marlin import multiplied_by_gemv


def test_activations_are_read_two_at_a_time() -> None:
    words, scales = torch.zeros(1, 1, 8, 32, dtype=torch.int32), torch.ones(1, 1, 8)
    even, odd = (MarlinMatrix(words, 8, 8, columns, -1, scales) for columns in (32, 31))
    x = torch.zeros(2, 64, dtype=torch.bfloat16)

    def reads_gemv(x: torch.Tensor, w13: MarlinMatrix, w2: MarlinMatrix) -> bool:
        return MarlinGemvLayer(Activation("silu"), GemvFunctions(None, "row"), w13, w2).reads(x)

    assert reads_gemv(x[:, :32], even, even)
    assert not reads_gemv(x[:, 1:33], even, even)
    assert not reads_gemv(x[:, :31], odd, even)
    assert not reads_gemv(torch.zeros(2, 33, dtype=torch.bfloat16)[:, :32], even, even)
    assert not reads_gemv(x[:, :32], even, replace(even, index=torch.zeros(1, 32, dtype=torch.int32)))
    assert not reads_gemv(x[:, :32], replace(even, pre_scales=torch.ones(1, 32)), even)


def test_words_of_an_older_layout_are_refused() -> None:
    words = torch.zeros(1, 8, 32, dtype=torch.int32)
    with pytest.raises(TensorError, match=r"\[1, 8, 32\]"):
        MarlinMatrix(words, 8, 8, 32, -1, torch.ones(1, 1, 8))


@pytest.mark.parametrize("bits", [4, 8])
def test_products_are_as_exact_as_16_bits_of_the_largest(bits: int, device: torch.device) -> None:
    torch.manual_seed(0)
    rows, columns, middle = 64, 256, 2 ** (bits - 1)
    codes = torch.randint(0, 2 * middle, (rows, columns), dtype=torch.uint8)
    packed = codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4
    weight = Converted(order_words(packed[None], columns, bits).to(device), torch.ones(1, 1, rows, device=device), -1)
    # numbers of many sizes, in all of which bfloat16 has 8 bits
    x = (torch.randn(3, columns) * torch.exp2(torch.randint(-9, 3, (3, columns)))).bfloat16()
    functions = GemvFunctions(int4_bytes if bits == 4 else int8_bytes, "row", middle)
    found = multiplied_by_gemv(weight, bits, functions, rows, x.to(device)).cpu().double()
    w, x = codes.double() - middle, x.double()
    # columns 2t, 2t + 1, 2t + 8, ... of a unit are integers of one unit, with 15 bits for the largest
    quads = x.reshape(3, -1, 512 // bits // 8, 4, 2)
    _, exponent = torch.frexp(quads.abs().amax(dim=(2, 4), keepdim=True))
    unit = torch.exp2(exponent.double() - 15).expand_as(quads).reshape(x.shape)
    integers = (x / unit).round()
    assert bool((integers != x / unit).any())
    # sums over four words are exact, then rounded to float32 and added up
    bound = 2.0**-24 * (1 + columns // 32 * bits // 4) * (x.abs() @ w.abs().T)
    assert bool(((found - (unit * integers) @ w.T).abs() <= bound).all())
