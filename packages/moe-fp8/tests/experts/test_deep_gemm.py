"""DeepGEMM where it is installed; everywhere, the adapter around a double that computes what DeepGEMM documents."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from moe_core import TRITON, Environment, FusedMoEConfig, MoEActivation, kFp8Dynamic128Sym, kFp8Static128BlockSym
from moe_core.spec.device import DeviceInfo
from moe_core.testing import ConformanceTests
from moe_fp8.experts.deep_gemm import (
    TILE,
    DeepGemmFp8BlockExperts,
    DeepGemmMxfp8Experts,
    contiguous_arguments,
)
from moe_fp8.experts.deep_gemm_batched import BatchedDeepGemmFp8BlockExperts, masked_arguments
from moe_fp8.libraries import DEEP_GEMM
from moe_fp8.libraries.requantize import power_of_two_scales, shared_scale
from moe_fp8.libraries.ue8m0 import packed_exponents

MISSING = Environment.current().reason_against(DEEP_GEMM)
needs_deep_gemm = pytest.mark.skipif(
    MISSING is not None, reason="DeepGEMM is not installed (the package index has no release with its kernels)"
)


@pytest.mark.gpu
@needs_deep_gemm
class TestDeepGemmFp8Block(ConformanceTests):
    experts = DeepGemmFp8BlockExperts


@pytest.mark.gpu
@needs_deep_gemm
class TestBatchedDeepGemmFp8Block(ConformanceTests):
    experts = BatchedDeepGemmFp8BlockExperts


def unpacked(words: torch.Tensor, groups: int) -> torch.Tensor:
    """[E, rows, groups] float32 of packed exponents."""
    exponents = (
        words.clone(memory_format=torch.contiguous_format).view(torch.uint8).view(*words.shape[:2], -1)[..., :groups]
    )
    return (exponents.int() << 23).view(torch.float32)


def product(a, scale, b, b_scale, out, group, exponents):
    """One expert: bf16 of the exact product of what the scales say."""
    if exponents:  # all that the tensor cores would see of a scale
        scale = (scale.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)
    wide = a.float() * scale.repeat_interleave(group, 1)
    weights = b.float() * b_scale.repeat_interleave(b.shape[0] // b_scale.shape[0], 0).repeat_interleave(group, 1)
    out.copy_(wide @ weights.t())


def checked(a, b, out, group):
    """Scales of (values, scales) pairs, as the library's own assertions want them."""
    values, scale = a
    matrix, matrix_scale = b
    rows, columns = values.shape[-2:]
    assert values.is_contiguous()
    assert matrix.is_contiguous()
    assert out.is_contiguous()
    assert out.dtype is torch.bfloat16
    assert values.dtype is matrix.dtype is torch.float8_e4m3fn
    assert scale.dtype is torch.float32
    assert rows % TILE == 0
    assert scale.shape[-2:] == (rows, columns // group)
    # rows next to each other, columns 16 bytes apart or a multiple of it
    assert scale.stride(-2) == 1
    assert scale.stride(-1) == rows
    if matrix_scale.dtype is torch.int32:
        assert matrix_scale.stride(-2) == 1
        assert matrix_scale.shape[1] == matrix.shape[1]
        return unpacked(matrix_scale, columns // group)
    assert group == 128
    assert matrix_scale.is_contiguous()
    assert matrix_scale.shape == (matrix.shape[0], matrix.shape[1] // 128, columns // 128)
    return matrix_scale


def contiguous(a, b, out, row_experts, *, recipe_a=(1, 128), recipe_b=(1, 128)):
    group = recipe_a[1]
    assert recipe_a == recipe_b
    scales = checked(a, b, out, group)
    for start in range(0, a[0].shape[0], TILE):
        experts = row_experts[start : start + TILE].unique().tolist()
        assert len(experts) == 1
        if experts[0] >= 0:
            rows = slice(start, start + TILE)
            product(
                a[0][rows],
                a[1][rows],
                b[0][experts[0]],
                scales[experts[0]],
                out[rows],
                group,
                b[1].dtype is torch.int32,
            )


def masked(a, b, out, counts, expected, *, recipe_a=(1, 128), recipe_b=(1, 128)):
    group = recipe_a[1]
    assert expected > 0
    scales = checked(a, b, out, group)
    for expert, count in enumerate(counts.tolist()):
        # the library computes whole tiles: what is beyond the rows in use is written too
        end = -(-count // TILE) * TILE
        rows = slice(0, end)
        exponents = b[1].dtype is torch.int32
        product(
            a[0][expert, rows], a[1][expert, rows], b[0][expert], scales[expert], out[expert, rows], group, exponents
        )


def double():
    return SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=contiguous, m_grouped_fp8_gemm_nt_masked=masked)


#: core computes activations: one gated, one with parameters and one without a gate are enough here
FEW = frozenset({MoEActivation.SILU, MoEActivation.SWIGLUOAI, MoEActivation.RELU2_NO_MUL})


def doubled(experts, **changes):
    """``experts`` with the double in the library's place."""
    claims = replace(experts.claims, requires=(TRITON,), activations=FEW, **changes)
    return type(f"Double{experts.__name__}", (experts,), {"claims": claims, "library": staticmethod(double)})


DoubleBlock = doubled(DeepGemmFp8BlockExperts)
DoubleBatched = doubled(BatchedDeepGemmFp8BlockExperts)
DoubleMxfp8 = doubled(DeepGemmMxfp8Experts)
DoubleBlackwell = doubled(DeepGemmFp8BlockExperts, devices=DeepGemmMxfp8Experts.claims.devices)


class TestDoubleBlock(ConformanceTests):
    experts = DoubleBlock
    device = "cpu"


class TestDoubleBatched(ConformanceTests):
    experts = DoubleBatched
    device = "cpu"


class TestDoubleMxfp8(ConformanceTests):
    experts = DoubleMxfp8
    device = "cpu"


class TestDoubleBlackwell(ConformanceTests):
    experts = DoubleBlackwell
    device = "cpu"


def operands(rows=256, columns=256, hidden=256, experts=2):
    e4m3 = torch.float8_e4m3fn
    a = (torch.zeros(rows, hidden, dtype=e4m3), torch.ones(hidden // 128, rows).t())
    b = (torch.zeros(experts, columns, hidden, dtype=e4m3), torch.ones(experts, columns // 128, hidden // 128))
    return a, b, torch.empty(rows, columns, dtype=torch.bfloat16), torch.zeros(rows, dtype=torch.int32)


@needs_deep_gemm
@pytest.mark.parametrize("group", [128, 32])
def test_calls_bind_to_the_installed_library(group):
    library = DEEP_GEMM.load()
    a, b, out, row_experts = operands()
    arguments, options = contiguous_arguments(a, b, out, row_experts, group=group)
    bound = inspect.signature(library.m_grouped_fp8_gemm_nt_contiguous).bind(*arguments, **options).arguments
    assert list(bound)[:4] == ["a", "b", "d", "grouped_layout"]
    counts = torch.zeros(2, dtype=torch.int32)
    arguments, options = masked_arguments(a, b, out, counts, 3, group=group)
    bound = inspect.signature(library.m_grouped_fp8_gemm_nt_masked).bind(*arguments, **options).arguments
    assert list(bound)[:5] == ["a", "b", "d", "masked_m", "expected_m"]


@pytest.mark.gpu
@needs_deep_gemm
def test_exponents_are_packed_as_the_library_packs_them():
    library = DEEP_GEMM.load()
    scale = torch.exp2(torch.randint(-20, 20, (3, 256, 6), device="cuda").float())
    theirs = library.get_mn_major_tma_aligned_packed_ue8m0_tensor(scale)
    ours = packed_exponents(scale, 256)
    assert ours.shape == theirs.shape
    assert ours.stride() == theirs.stride()
    assert torch.equal(ours, theirs)


def test_packed_exponents():
    scale = torch.exp2(torch.randint(-20, 20, (2, 3, 5)).float())
    words = packed_exponents(scale, 384)
    assert words.shape == (2, 384, 2)
    assert words.stride(1) == 1
    assert torch.equal(unpacked(words, 5), scale.repeat_interleave(128, 1))
    assert torch.equal(packed_exponents((scale.view(torch.int32) >> 23).to(torch.uint8), 384), words)
    assert packed_exponents(scale, 6).stride() == (16, 1, 8)


def test_power_of_two_scales():
    w = torch.randn(2, 256, 384).clamp(-2, 2).mul(200).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2, 3) / 100 + 1e-4
    scale[0, 0, 0], scale[1, 1, 1] = 0.0, 2.0**-7
    before = scale.clone()
    new, rounded = power_of_two_scales(w, scale, (128, 128))
    assert torch.equal(scale, before)
    positive = rounded[rounded > 0]
    assert torch.equal(positive.log2().round().exp2(), positive)
    assert (rounded >= scale).all()
    assert (rounded < 2 * scale)[scale > 0].all()
    assert torch.equal(new[1, 128:, 128:256].float(), w[1, 128:, 128:256].float())

    def values(codes, scales):
        return codes.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)

    exact, step = values(w, scale), rounded.repeat_interleave(128, 1).repeat_interleave(128, 2)
    error = (values(new, rounded) - exact).abs()
    # half a unit of e4m3's three mantissa bits, or of its subnormals
    assert (error <= torch.maximum(exact.abs() * 2**-4, step * 2**-10)).all()
    again, same = power_of_two_scales(new, rounded, (128, 128))
    assert again is new
    assert same is rounded


def test_shared_scale():
    # within e4m3's range, beyond which codes are NaN
    w = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0)).mul(100).clamp(-448, 448)
    w = w.to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 0.25], [0.1, 0.1]])
    new, largest = shared_scale(w, scale)
    assert torch.equal(largest, torch.tensor([[0.5, 0.5], [0.1, 0.1]]))
    assert torch.equal(new[1].float(), w[1].float())
    assert torch.equal(new[0, :32].float(), w[0, :32].float())
    # halves of e4m3 numbers are e4m3 numbers, but for the smallest
    assert torch.allclose(new[0, 32:].float(), w[0, 32:].float() / 2, atol=2**-10, rtol=0)
    assert shared_scale(new, largest)[0] is new


def test_sizes_that_are_no_whole_blocks_are_refused():
    reason = DeepGemmFp8BlockExperts.unsupported_reasons(
        FusedMoEConfig(num_experts=8, top_k=2, hidden_size=256, intermediate_size=192),
        kFp8Static128BlockSym,
        kFp8Dynamic128Sym,
        DeviceInfo.parse("sm90"),
        Environment({"deep_gemm": "2.8.1", "triton": "3.6"}),
    )
    assert reason == ["needs intermediate_size to be a multiple of 128, got 192"]
