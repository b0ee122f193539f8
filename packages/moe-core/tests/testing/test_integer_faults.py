"""The conformance kit finds mistakes with integers in groups: experts with one fault each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_core import (
    Claims,
    FusedMoEQuantDesc,
    KernelWeights,
    KeyPattern,
    MoEActivation,
    MoEWeights,
    any_device,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kInt4Static,
    kInt4Static32,
    kInt4StaticAsym,
    kInt8Static,
    kInt8StaticAsym,
)
from moe_core.interface.experts import FusedMoEExperts
from moe_core.reference.torch_experts import TorchExperts
from moe_core.spec.quant_key import GroupShape
from moe_core.testing import cases_for
from moe_core_failures import check_found, failures
from torch import Tensor

SHAPES = (GroupShape(1, 32), GroupShape(1, 128), GroupShape(1, -1))
PERMUTED = replace(kInt4Static32, permuted=True)
PRE_SCALED = replace(kInt4Static, pre_scaled=True)


def claims(*keys: Any) -> Claims:
    return Claims(
        devices=(any_device(),),
        keys=tuple((key, None) if not isinstance(key, tuple) else key for key in keys),
        activations=frozenset({MoEActivation.SILU, MoEActivation.RELU2_NO_MUL}),
        bias=True,
        apply_router_weight_on_input=True,
        cuda_graph=False,
    )


class Sound(TorchExperts):
    claims = claims(
        *(
            KeyPattern(base, SHAPES, (torch.bfloat16, torch.float32), permuted=(False, True), pre_scaled=(False, True))
            for base in (kInt4Static, kInt4StaticAsym, kInt8Static, kInt8StaticAsym)
        ),
        *((PRE_SCALED, key) for key in (kFp8DynamicTokenSym, kFp8DynamicTensorSym, kFp8StaticTensorSym)),
    )


class IgnoresColumnGroups(TorchExperts):
    claims = claims(PERMUTED)

    def matrix(self, weights: Tensor, desc: FusedMoEQuantDesc, expert: int, parts: int, cols: int) -> Tensor:
        assert desc.key is not None
        assert desc.scale is not None
        groups = desc.key.group_shape.grid(1, cols)[1]
        plain = replace(desc, key=replace(desc.key, permuted=False), g_idx=None, scale=desc.scale[..., :groups])
        return super().matrix(weights, plain, expert, parts, cols)


class ColumnGroupsOfTheFirstExpert(TorchExperts):
    claims = claims(PERMUTED)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        g_idx = weights.w13_g_idx
        assert g_idx is not None
        return super().convert(replace(weights, w13_g_idx=g_idx[:1].expand_as(g_idx).contiguous()))


class SortedColumnsFillGroups(TorchExperts):
    """Takes the columns, sorted by group, for groups of equal size."""

    claims = claims(PERMUTED)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        found = {}
        for name in ("w13_g_idx", "w2_g_idx"):
            g_idx: Tensor = getattr(weights, name)
            place = g_idx.argsort(dim=1, stable=True).argsort(dim=1)
            found[name] = (place // 32).to(torch.int32)
        return super().convert(replace(weights, **found))


class IgnoresZeroPoints(TorchExperts):
    """Takes the middle of the codes for all of them."""

    claims = claims(kInt4StaticAsym)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        zero_point = weights.w13_zero_point
        assert zero_point is not None
        return super().convert(replace(weights, w13_zero_point=torch.full_like(zero_point, 8)))


class ZeroPointsLessOne(TorchExperts):
    claims = claims(kInt8StaticAsym)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        zero_point = weights.w2_zero_point
        assert zero_point is not None
        return super().convert(replace(weights, w2_zero_point=zero_point.int() - 1))


class ZeroPointsInFourBits(TorchExperts):
    """Stores zero points like codes, where 16 becomes 0."""

    claims = claims(kInt4StaticAsym)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        zero_point = weights.w13_zero_point
        assert zero_point is not None
        return super().convert(replace(weights, w13_zero_point=zero_point & 15))


class ZeroPointsInBytes(TorchExperts):
    """Stores zero points of 8-bit codes in bytes, where 256 becomes 0."""

    claims = claims(kInt8StaticAsym)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        zero_point = weights.w13_zero_point
        assert zero_point is not None
        return super().convert(replace(weights, w13_zero_point=zero_point.to(torch.uint8)))


class ZeroPointsOfTheNextGroup(TorchExperts):
    claims = claims(kInt4StaticAsym.with_group(1, 32))

    def convert(self, weights: MoEWeights) -> KernelWeights:
        zero_point = weights.w2_zero_point
        assert zero_point is not None
        return super().convert(replace(weights, w2_zero_point=zero_point.roll(1, dims=2)))


class IgnoresInputFactors(TorchExperts):
    claims = claims(PRE_SCALED)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        factors = weights.w13_pre_scale
        assert factors is not None
        return super().convert(replace(weights, w13_pre_scale=torch.ones_like(factors)))


class IgnoresSecondInputFactors(TorchExperts):
    claims = claims(PRE_SCALED)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        factors = weights.w2_pre_scale
        assert factors is not None
        return super().convert(replace(weights, w2_pre_scale=torch.ones_like(factors)))


class InputFactorsOfTheFirstExpert(TorchExperts):
    claims = claims(PRE_SCALED)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        factors = weights.w13_pre_scale
        assert factors is not None
        return super().convert(replace(weights, w13_pre_scale=factors[:1].expand_as(factors).contiguous()))


class InputFactorsAfterTheQuantizer(TorchExperts):
    claims = claims((PRE_SCALED, kFp8DynamicTokenSym))

    def _quantized_rows(self, x: Tensor, desc: FusedMoEQuantDesc, expert: int) -> Tensor:
        return x

    def _entering(self, x: Tensor, desc: FusedMoEQuantDesc, expert: int) -> Tensor:  # type: ignore[override]
        return super()._entering(self.quantized(x, replace(desc, key=kFp8DynamicTokenSym)), desc, expert)


class SwapsCodes(TorchExperts):
    claims = claims(kInt4Static)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        return super().convert(replace(weights, w2=(weights.w2 >> 4) | (weights.w2 << 4)))


class ReadsCodesAsSigned(TorchExperts):
    """Takes unsigned codes for two's complement."""

    claims = claims(kInt8Static)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        return super().convert(replace(weights, w13=weights.w13 ^ 0x80))


class LosesTheLowestCode(TorchExperts):
    """Takes -8 for -7, as a symmetric range would have it."""

    claims = claims(kInt8Static)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        return super().convert(replace(weights, w13=weights.w13.clamp(min=1)))


class ScalesWithoutSign(TorchExperts):
    claims = claims(kInt4Static)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        scale = weights.w13_scale
        assert scale is not None
        return super().convert(replace(weights, w13_scale=scale.abs()))


class ForgetsTheShortGroup(TorchExperts):
    """Reads full groups only."""

    claims = claims(kInt4Static32)

    def matrix(self, weights: Tensor, desc: FusedMoEQuantDesc, expert: int, parts: int, cols: int) -> Tensor:
        w = super().matrix(weights, desc, expert, parts, cols)
        w[:, cols // 32 * 32 :] = 0
        return w


class LayoutOfTheOtherMatrix(TorchExperts):
    """Lays out the scales of w13 as the number of groups of w2 asks for."""

    claims = claims(kInt4Static)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        scale = weights.w13_scale
        assert scale is not None
        if self.config.intermediate_size <= 128 < self.config.hidden_size:
            scale = scale.flatten(1).view(len(scale), scale.shape[2], -1).mT.reshape(scale.shape)
        return super().convert(replace(weights, w13_scale=scale))


OUTSIDE, NORM = "outside their bounds", "the error's norm"
#: the fault, and what at least one failing case must say
FAULTS: list[tuple[type[FusedMoEExperts], str]] = [
    (IgnoresColumnGroups, OUTSIDE),
    (ColumnGroupsOfTheFirstExpert, OUTSIDE),
    (SortedColumnsFillGroups, OUTSIDE),
    (IgnoresZeroPoints, OUTSIDE),
    (ZeroPointsLessOne, OUTSIDE),
    (ZeroPointsInFourBits, OUTSIDE),
    (ZeroPointsInBytes, OUTSIDE),
    (ZeroPointsOfTheNextGroup, OUTSIDE),
    (IgnoresInputFactors, OUTSIDE),
    (IgnoresSecondInputFactors, OUTSIDE),
    (InputFactorsOfTheFirstExpert, OUTSIDE),
    (InputFactorsAfterTheQuantizer, NORM),
    (SwapsCodes, OUTSIDE),
    (ReadsCodesAsSigned, OUTSIDE),
    (LosesTheLowestCode, NORM),
    (ScalesWithoutSign, OUTSIDE),
    (ForgetsTheShortGroup, OUTSIDE),
    (LayoutOfTheOtherMatrix, OUTSIDE),
]


def test_sound_experts_pass() -> None:
    assert not failures(Sound)


#: what the kit calls the fault; nothing where it is none of the usual mistakes
MISTAKES: dict[type[FusedMoEExperts], str] = {
    IgnoresColumnGroups: "the columns' groups of w13 and w2 are ignored",
    ColumnGroupsOfTheFirstExpert: "the columns' groups of w13 are those of expert 0",
    SortedColumnsFillGroups: "the sorted columns of w13 and w2 are taken to fill their groups",
    IgnoresZeroPoints: "the zero points of w13 are the middle of the codes",
    ZeroPointsLessOne: "the zero points of w2 are one too small",
    ZeroPointsInFourBits: "the zero points of w13 are cut to a code's bits",
    ZeroPointsInBytes: "the zero points of w13 are cut to a code's bits",
    ZeroPointsOfTheNextGroup: "the zero points of w2 are those of another group",
    IgnoresInputFactors: "the factors of the inputs of w13 are left out",
    IgnoresSecondInputFactors: "the factors of the inputs of w2 are left out",
    InputFactorsOfTheFirstExpert: "the factors of the inputs of w13 are those of expert 0",
    SwapsCodes: "the two codes of each byte of w2 are swapped",
    ReadsCodesAsSigned: "the codes of w13 are read as two's complement",
    ScalesWithoutSign: "the scales of w13 lose their sign",
    LayoutOfTheOtherMatrix: "the memory of the scales of w13 is read as that of a transposed matrix",
}


@pytest.mark.parametrize(("experts", "message"), FAULTS, ids=[experts.__name__ for experts, _ in FAULTS])
def test_fault_is_found(experts: type[FusedMoEExperts], message: str) -> None:
    check_found(experts, message, MISTAKES.get(experts))


def test_every_pair_of_values_of_a_pattern_and_every_shape_with_every_group() -> None:
    cases = [case for case in cases_for(Sound, device="cpu") if case.check == "values"]
    keys = {case.weight_key for case in cases if case.weight_key is not None}
    for permuted in (False, True):
        for pre_scaled in (False, True):
            assert any((key.permuted, key.pre_scaled) == (permuted, pre_scaled) for key in keys)
        for shape in SHAPES:
            for dtype in (torch.bfloat16, torch.float32):
                assert any((key.group_shape, key.scale.dtype) == (shape, dtype) for key in keys)
                assert any((key.group_shape, key.permuted) == (shape, permuted) for key in keys)
    met = {
        (case.weight_key.dtype, case.weight_key.group_shape, case.config.hidden_size)
        for case in cases
        if case.weight_key is not None and case.activation_key is None
    }
    sizes = {size for *_, size in met}
    assert len(sizes) == 3
    assert len(met) == 4 * len(SHAPES) * len(sizes)
