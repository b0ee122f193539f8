"""What the grouped product offers to schemes: scales after the loop, several scales per tile, largest magnitudes.

A toy scheme in float32 with small integers, so that every sum is exact.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from moe_core.errors import TensorError
from moe_core.kernels.gemm.plan import TileConfig
from moe_core.kernels.gemm.tiles.launch import (
    Activation,
    Gemm,
    GemmWeight,
    OperandA,
    Result,
    Routing,
    TileFunctions,
    constant,
    grouped_gemm,
    reduce_split_k,
)
from moe_core.kernels.ops.sort import sort_pairs, sort_workspaces
from moe_core.spec.workspace import Workspace, workspace_nbytes

TOKENS, TOP_K, EXPERTS, HIDDEN, SIZE, BLOCK = 5, 2, 3, 32, 40, 32


@triton.jit
def open_a(a_args, rows, expert):
    values, stride, factors = a_args
    return values + rows * stride, tl.load(factors + expert)


@triton.jit
def load_a(state, k, BLOCK_K: tl.constexpr):
    return tl.load(state[0][:, None] + (k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]), 0.0


@triton.jit
def open_b(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    values, stride_e, stride_n = b_args
    columns = n + tl.arange(0, BLOCK_N)
    return values + expert * stride_e + (half * N + columns) * stride_n, columns < N


@triton.jit
def load_b(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    rows, inside = state
    return tl.load(rows[:, None] + (k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :], mask=inside[:, None], other=0.0), 0.0


@triton.jit
def multiply(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    if SWAP_AB:
        return tl.dot(b, tl.trans(a), acc, input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(b), acc, input_precision="ieee")


@triton.jit
def scale_acc(acc, a_state, b_state, SWAP_AB: tl.constexpr):
    return acc * a_state[1]


@triton.jit
def halves(tile, quant_args, expert, AXIS: tl.constexpr):
    """Values plus the expert's offset; as scales the sums of both halves of the columns."""
    if AXIS == 1:
        scale = tl.sum(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), axis=2)
    else:
        scale = tl.sum(tl.reshape(tile, (2, tile.shape[0] // 2, tile.shape[1])), axis=1)
    return tile + tl.load(quant_args[0] + expert), scale


@triton.jit
def shifted(tile, quant_args, expert, AXIS: tl.constexpr):
    return tile + tl.load(quant_args[0] + expert), 0.0


class Product:
    """An up product without a gate, relu2(factor * w x), over sorted pairs."""

    def __init__(self, device):
        generator = torch.Generator().manual_seed(0)

        def integers(*shape):
            return torch.randint(-3, 4, shape, generator=generator).float().to(device)

        self.x, self.w = integers(TOKENS, HIDDEN), integers(EXPERTS, SIZE, HIDDEN)
        self.factors = torch.tensor([1.0, 2.0, 4.0], device=device)
        self.offsets = torch.tensor([100.0, 200.0, 300.0], device=device)
        self.ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices.int().to(device)
        self.ids[1, 0] = -1
        specs = sort_workspaces(TOKENS * TOP_K, EXPERTS, 16)
        buffer = torch.full((workspace_nbytes(specs),), 0xFF, dtype=torch.uint8, device=device)
        self.amax = torch.full((TOKENS * TOP_K,), -1, dtype=torch.int32, device=device)
        self.order = sort_pairs(
            self.ids, EXPERTS, 16, workspace=Workspace(device, buffer).take(specs), positions=True, zero=self.amax
        )
        self.routing = Routing(self.ids, torch.ones(TOKENS, TOP_K, device=device), EXPERTS)

    def __call__(self, out, *, swap, split):
        functions = TileFunctions(open_a, load_a, open_b, load_b, multiply, scale_acc)
        strides = self.w.stride(0), self.w.stride(1)
        weight = GemmWeight((self.w, *strides), SIZE, HIDDEN, lambda config: functions, block_k=16)
        activation = Activation("relu2_no_mul")
        parts = torch.empty(TOKENS * TOP_K * split, SIZE, device=self.x.device)
        gemm = Gemm(
            TileConfig(16, BLOCK, 4, 1, swap_ab=swap, split_k=split),
            weight,
            OperandA((self.x, self.x.stride(0), self.factors), "token"),
            out if split == 1 else Result.of(parts),
            self.order,
            self.routing,
            activation,
            "position" if split == 1 else "pair",
        )
        grouped_gemm(gemm)
        if split > 1:
            reduce_split_k(gemm, out._replace(block=constant(BLOCK)))

    def expected(self, split):
        """(row of the result, expert, values padded to whole tiles) of each pair that has an expert."""
        for pair, expert in enumerate(self.ids.flatten().tolist()):
            if expert >= 0:
                row = pair if split > 1 else int(self.order.positions[pair])
                h = (self.factors[expert] * (self.w[expert] @ self.x[pair // TOP_K])).clamp(min=0).square()
                yield row, expert, torch.nn.functional.pad(h, (0, 2 * BLOCK - SIZE))


CASES = pytest.mark.parametrize(("swap", "split"), [(False, 1), (True, 1), (True, 2)])


@CASES
def test_several_scales_of_a_tile(swap, split, device):
    product = Product(device)
    values = torch.full((TOKENS * TOP_K, 2 * BLOCK), -1.0, device=device)
    scales = torch.full((TOKENS * TOP_K, 4), -1.0, device=device)
    product(
        Result.of(values, scales, quantize=halves, quant_args=(product.offsets,), groups=constant(2)),
        swap=swap,
        split=split,
    )
    for row, expert, h in product.expected(split):
        assert torch.equal(values[row], h + product.offsets[expert])
        assert torch.equal(scales[row], h.view(4, BLOCK // 2).sum(1))


@CASES
def test_no_scale_is_stored(swap, split, device):
    product = Product(device)
    values = torch.full((TOKENS * TOP_K, 2 * BLOCK), -1.0, device=device)
    product(Result.of(values, quantize=shifted, quant_args=(product.offsets,)), swap=swap, split=split)
    for row, expert, h in product.expected(split):
        assert torch.equal(values[row], h + product.offsets[expert])


@pytest.mark.parametrize("kind", ["row", "tensor"])
@CASES
def test_largest_magnitudes(swap, split, kind, device):
    product = Product(device)
    values = torch.full((TOKENS * TOP_K, 2 * BLOCK), -1.0, device=device)
    amax = product.amax if kind == "row" else product.amax[:1]
    product(Result.of(values, amax=amax, amax_kind=constant(kind)), swap=swap, split=split)
    largest = {}
    for row, _, h in product.expected(split):
        assert torch.equal(values[row], h)
        largest[row] = float(h.max())
    found = amax.view(torch.float32)
    if kind == "tensor":
        assert float(found) == max(largest.values())
    else:
        assert [float(found[row]) for row in largest] == list(largest.values())


def test_rows_of_h_without_room_for_whole_tiles_are_refused(device):
    product = Product(device)
    with pytest.raises(TensorError, match=f"{SIZE} columns"):
        product(Result.of(torch.empty(TOKENS * TOP_K, SIZE, device=device)), swap=False, split=1)
