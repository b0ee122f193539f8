"""The warp-specialized kernel of 4-bit words beside the tile kernel, whose sums it adds up in the same order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core.kernels.gemm.fragments.convert import convert_integers
from moe_core.kernels.gemm.marlin.integers import integer_functions, integer_words
from moe_core.kernels.gemm.marlin.weight import MarlinMatrix
from moe_core.kernels.gemm.plan import TileConfig
from moe_core.kernels.gemm.sm90.mixed_input_launch import HEIGHTS, RING, STEP, WORDS, WORDS_BOX, words_gemm
from moe_core.kernels.gemm.tiles.launch import Activation, Gemm, OperandA, Result, Routing, grouped_gemm
from moe_core.kernels.ops.sort import SortedPairs, sort_pairs, sort_workspaces
from moe_core.spec.quant_key import GroupShape, kInt4Static, kInt4StaticAsym

#: rows of each expert: every height with its first and last number of rows, none, and several tiles
COUNTS = (128, 0, 97, 96, 65, 64, 49, 48, 33, 32, 25, 24, 17, 16, 9, 8, 1, 301)


class Product:
    """Weights [E, N or 2N, K] of random codes, rows of ``COUNTS`` in the sorted order, and both kernels' results."""

    def __init__(
        self,
        device: torch.device,
        *,
        group: int = 128,
        zeros: bool = False,
        gated: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        n: int = 200,
        k: int = 400,
        bias: bool = False,
        spread: bool = False,
        scale_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        generator = torch.Generator().manual_seed(n + k + group)
        base = kInt4StaticAsym if zeros else kInt4Static
        key = replace(base, scale=replace(base.scale, group_shape=GroupShape(1, group)))
        experts, rows, groups = len(COUNTS), 2 * n if gated else n, 1 if group == -1 else -(-k // group)

        def draw(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator)

        self.scale = (torch.rand(experts, rows, groups, generator=generator) / 50 + 0.001).to(scale_dtype)
        if spread:
            # from 2^-24 to 2^27, one expert's beside another's
            self.scale *= torch.exp2(3.0 * torch.arange(experts) - 24)[:, None, None].to(scale_dtype)
        self.codes = draw(0, 16, experts, rows, k).to(torch.uint8)
        self.zeros = draw(0, 17, experts, rows, groups).to(torch.uint8) if zeros else None
        self.group, self.dtype, self.device = group, dtype, device
        packed = (self.codes[..., 0::2] | self.codes[..., 1::2] << 4).to(device)
        made = convert_integers(
            packed,
            self.scale.to(device),
            key,
            k,
            zero_point=None if self.zeros is None else self.zeros.to(device),
            interleaved=gated,
            dtype=dtype,
        )
        self.bias = torch.randn(experts, rows, generator=generator).bfloat16().to(device) if bias else None
        matrix = MarlinMatrix(
            made.words,
            4,
            n,
            k,
            group,
            made.scales,
            made.channel_scales,
            self.bias,
            interleaved=gated,
            powers=made.powers,
        )
        self.weight = matrix.gemm_weight(integer_functions, integer_words(matrix))
        ids = torch.repeat_interleave(torch.arange(experts), torch.tensor(COUNTS))
        ids = torch.cat([ids, torch.tensor([-1] * 5)])[torch.randperm(len(ids) + 5, generator=generator)]
        router = torch.rand(len(ids) // 2, 2, generator=generator)
        self.routing = Routing(ids.int().view(-1, 2).to(device), router.to(device), experts)
        self.columns, self.number = n, len(ids)
        self.tokens = torch.randn(len(ids) // 2, k, generator=generator).to(dtype).to(device)
        self.values = torch.zeros(len(ids), k, dtype=dtype, device=device)
        some = self.pairs(64).pairs[: sum(COUNTS)].long()
        self.values[: sum(COUNTS)] = self.tokens[some // 2]

    def pairs(self, rows: int) -> SortedPairs:
        experts = len(COUNTS)
        specs = sort_workspaces(self.number, experts, rows)
        workspace = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs}
        return sort_pairs(self.routing.ids, experts, rows, workspace=workspace)

    def poisoned(self, activation: Activation | None) -> torch.Tensor:
        """[pairs, N], of h with room for whole tiles."""
        columns = self.columns if activation is None else -(-self.columns // 128) * 128
        return torch.full((self.number, columns), float("nan"), dtype=self.dtype, device=self.device)

    def special(self, rows: int, activation: Activation | None, gathers: bool = False) -> torch.Tensor:
        out = self.poisoned(activation)
        config = TileConfig(rows, 128, 4, 3, 8, swap_ab=True, warp_specialized=True)
        values, which = (self.tokens, "token") if gathers else (self.values, "position")
        a = OperandA((values, values.stride(0)), which, warp_specialized=(2,) if gathers else ())
        words_gemm(Gemm(config, self.weight, a, Result.of(out), self.pairs(rows), self.routing, activation))
        return out[:, : self.columns]

    def tiles(self, activation: Activation | None) -> torch.Tensor:
        out, config = self.poisoned(activation), TileConfig(64, 128, 4, 3, 8, swap_ab=True)
        a = OperandA((self.values, self.values.stride(0), self.values.shape[1]), "position")
        rows = "pair" if activation is None else "position"
        grouped_gemm(Gemm(config, self.weight, a, Result.of(out), self.pairs(64), self.routing, activation, rows))
        return out[:, : self.columns]

    def exact(self) -> torch.Tensor:
        """The product without activation, float64 [pairs, N]; NaN where there is none."""
        size = self.values.shape[1] if self.group == -1 else self.group

        def wide(x: torch.Tensor) -> torch.Tensor:
            return x.double().repeat_interleave(size, 2)[..., : self.codes.shape[2]]

        w = (self.codes.double() - (8 if self.zeros is None else wide(self.zeros))) * wide(self.scale)
        order = self.pairs(64)
        out = torch.full((self.number, self.columns), float("nan"), dtype=torch.float64)
        values, pairs = self.values.double().cpu(), order.pairs.cpu().long()
        for expert, count in enumerate(COUNTS):
            first = sum(COUNTS[:expert])
            z = values[first : first + count] @ w[expert].T
            if self.bias is not None:
                z = z + self.bias[expert].double().cpu()
            rows = pairs[first : first + count]
            out[rows] = z * self.routing.weights.flatten()[rows].double().cpu()[:, None]
        return out


@pytest.fixture
def hopper(device: torch.device) -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is Hopper's own")
    return device


#: rows of the schedule's tiles, whether rows of tokens are gathered, and weights: each compiles for seconds
CASES = [
    (128, True, {"bias": True}),
    (64, False, {"group": 64, "n": 264, "k": 136, "spread": True}),
    # an odd number of rows, none of which shares a row of the tensor map with another
    (64, True, {"zeros": True, "n": 201}),
    # of five groups two in a word each, and an only one; both in a step, one, and one of float32
    (64, True, {"group": 64, "n": 264, "k": 320, "scale_dtype": torch.float16}),
    (128, True, {"group": 32, "k": 160}),
    (64, False, {"n": 264, "k": 640, "scale_dtype": torch.float16}),
    (64, False, {"n": 264, "k": 640, "scale_dtype": torch.float32}),
    (64, True, {"group": 32, "zeros": True, "dtype": torch.float16, "k": 416}),
    (128, False, {"group": -1, "zeros": True, "k": 1024, "n": 1000}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "gathers", "case"), CASES, ids=str)
def test_products_have_the_bits_of_the_tile_kernel(rows, gathers, case, hopper):
    product = Product(hopper, **case)
    expected, exact = product.tiles(None), product.exact()
    found = product.special(rows, None, gathers)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    some = ~exact.isnan()
    found = found.double().cpu()
    assert torch.equal(found.isnan(), ~some)
    # weights are rounded to 16 bits with their scale, and so is the result: 2^-9 each at most
    assert float((found - exact)[some].norm() / exact[some].norm()) < 2**-8


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "name"), [(64, "gelu"), (128, "silu")])
def test_activated_products(rows, name, hopper):
    product = Product(hopper, gated=True, bias=True)
    expected = product.tiles(Activation(name))
    found = product.special(rows, Activation(name), gathers=True)
    some = ~expected.isnan()
    assert torch.equal(found.isnan(), ~some)
    # silu by another formula, and the compiler joins operations as it likes: rarely another neighbor
    assert float((found - expected)[some].double().norm() / expected[some].double().norm()) < 2**-12


@pytest.mark.parametrize(("rows", "heights"), HEIGHTS.items())
def test_heights(rows, heights):
    assert heights[0] == rows
    assert list(heights) == sorted(heights, reverse=True)
    # parts of sums are powers of two that tensor cores have, and blocks of the copies fit all
    assert all(height % 8 == 0 and height // (3 if height % 3 == 0 else 1) % 8 == 0 for height in heights)
    # words and activations of three steps at least, beside their scales, of four groups, and 8 KB for the epilogue
    stages = RING // (WORDS_BOX * WORDS * 4 + rows * STEP * 2)
    assert stages >= 3
    assert RING + stages * 4 * WORDS_BOX * 4 + 8192 <= 227 * 1024
