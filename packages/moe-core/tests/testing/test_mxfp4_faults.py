"""The conformance kit finds mistakes with e2m1 codes and their scales: experts with one fault each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import (
    Claims,
    FusedMoEQuantDesc,
    KernelWeights,
    MoEActivation,
    MoEWeights,
    any_device,
    kMxfp4Dynamic,
    kMxfp4Static,
    kMxfp8Dynamic,
)
from moe_core.interface.experts import FusedMoEExperts
from moe_core.reference.torch_experts import TorchExperts
from moe_core.spec.numerics import E2M1_VALUES, e8m0_to_float32
from moe_core_failures import check_found, failures
from torch import Tensor

CLAIMS = Claims(
    devices=(any_device(),),
    keys=((kMxfp4Static, None),),
    activations=frozenset({MoEActivation.SILU, MoEActivation.SWIGLUOAI, MoEActivation.RELU2_NO_MUL}),
    bias=True,
    cuda_graph=False,
)
GATED_ONLY = replace(CLAIMS, activations=frozenset({MoEActivation.SWIGLUOAI}))


class Sound(TorchExperts):
    claims = replace(CLAIMS, keys=tuple((kMxfp4Static, key) for key in (None, kMxfp8Dynamic, kMxfp4Dynamic)))


class OtherWeights(TorchExperts):
    """Reads canonical tensors as if they were others."""

    claims = CLAIMS

    def convert(self, weights: MoEWeights) -> KernelWeights:
        return super().convert(replace(weights, **self.misread(weights)))

    def misread(self, weights: MoEWeights) -> dict[str, Tensor]:
        raise NotImplementedError


class SwapsCodes(OtherWeights):
    """Takes the upper four bits for the even column."""

    def misread(self, weights: MoEWeights) -> dict[str, Tensor]:
        return {name: codes << 4 | codes >> 4 for name, codes in (("w13", weights.w13), ("w2", weights.w2))}


class Decodes(TorchExperts):
    """Its own decoder: ``table`` of codes 0 to 7, and what a scale's byte is worth."""

    claims = CLAIMS
    table = E2M1_VALUES[:8]

    def matrix(self, weights: Tensor, desc: FusedMoEQuantDesc, expert: int, parts: int, cols: int) -> Tensor:
        assert desc.scale is not None
        codes = torch.stack((weights[expert] & 15, weights[expert] >> 4), dim=2).flatten(1)[:, :cols].long()
        values = torch.tensor([*self.table, *(-value for value in self.table)])[codes]
        return values * self.scales(desc.scale[expert]).repeat_interleave(32, dim=1)[:, :cols]

    def scales(self, scale: Tensor) -> Tensor:
        return e8m0_to_float32(scale)


class FlushesSubnormals(Decodes):
    """0.5 is the only subnormal number."""

    table = (0.0, 0.0, *E2M1_VALUES[2:8])


class SubnormalsWithALeadingOne(Decodes):
    """Code 1 as if it were normal: 1.5 * 2**-1."""

    table = (0.0, 0.75, *E2M1_VALUES[2:8])


class ReadsIntegers(Decodes):
    """Codes as integers of a sign and three bits, in halves."""

    table = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5)


class BiasOf128(Decodes):
    def scales(self, scale: Tensor) -> Tensor:
        return e8m0_to_float32((scale.int() - 1).clamp_min(0).to(torch.uint8))


class LargestExponentIsInfinite(Decodes):
    """Makes 2**127 of a float32 exponent that is one too large, and corrects it afterwards."""

    def scales(self, scale: Tensor) -> Tensor:
        return ((scale.int() + 1) << 23).view(torch.float32) / 2


class ScaleOfTheNextGroup(OtherWeights):
    def misread(self, weights: MoEWeights) -> dict[str, Tensor]:
        assert weights.w13_scale is not None
        return {"w13_scale": weights.w13_scale.roll(1, dims=2)}


class ScaleOfTheNextRow(OtherWeights):
    def misread(self, weights: MoEWeights) -> dict[str, Tensor]:
        assert weights.w2_scale is not None
        return {"w2_scale": weights.w2_scale.roll(1, dims=1)}


def in_turns(tensor: Tensor) -> Tensor:
    """Rows of two halves in turns."""
    return tensor.unflatten(1, (2, -1)).transpose(1, 2).reshape(tensor.shape)


class HalvesTakenForTurns(OtherWeights):
    """Rows, scales and biases of gate and up in turns."""

    claims = GATED_ONLY

    def misread(self, weights: MoEWeights) -> dict[str, Tensor]:
        tensors = {"w13": weights.w13, "w13_scale": weights.w13_scale, "w13_bias": weights.w13_bias}
        return {name: in_turns(tensor) for name, tensor in tensors.items() if tensor is not None}


class BiasInTurns(OtherWeights):
    """The bias alone was left as another order has it."""

    claims = GATED_ONLY

    def misread(self, weights: MoEWeights) -> dict[str, Tensor]:
        return {} if weights.w13_bias is None else {"w13_bias": in_turns(weights.w13_bias)}


class ScalesInTurns(OtherWeights):
    claims = GATED_ONLY

    def misread(self, weights: MoEWeights) -> dict[str, Tensor]:
        assert weights.w13_scale is not None
        return {"w13_scale": in_turns(weights.w13_scale)}


class Unquantized(TorchExperts):
    """16-bit activations where MXFP8 ones were asked for."""

    claims = replace(CLAIMS, keys=((kMxfp4Static, kMxfp8Dynamic),))

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        return x.to(self.config.dtype).float()


class UnquantizedMxfp4(Unquantized):
    claims = replace(CLAIMS, keys=((kMxfp4Static, kMxfp4Dynamic),))


class QuantizesToMxfp8(TorchExperts):
    """MXFP8 activations where MXFP4 ones were asked for."""

    claims = replace(CLAIMS, keys=((kMxfp4Static, kMxfp4Dynamic),))

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        return super().quantized(x, replace(desc, key=kMxfp8Dynamic), scale)


class QuantizesTheFirstInputOnly(TorchExperts):
    claims = replace(CLAIMS, keys=((kMxfp4Static, kMxfp8Dynamic),))

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        return super().quantized(x, desc, scale) if x.shape[1] == self.config.hidden_size else x


class FixedLimit(TorchExperts):
    """The limit of one model, whatever the config says."""

    claims = GATED_ONLY

    def first(self, x: Tensor, weights: KernelWeights, expert: int, added: Tensor | None = None) -> Tensor:
        config, given = self.config, self.config.params
        self.config = replace(config, activation_params=replace(given, limit=7.0))
        try:
            return super().first(x, weights, expert, added)
        finally:
            self.config = config


OUTSIDE, NORM = "outside their bounds", "the error's norm"
#: the fault, and what at least one failing case must say
FAULTS: list[tuple[type[FusedMoEExperts], str]] = [
    (SwapsCodes, OUTSIDE),
    (FlushesSubnormals, OUTSIDE),
    (SubnormalsWithALeadingOne, OUTSIDE),
    (ReadsIntegers, OUTSIDE),
    (BiasOf128, OUTSIDE),
    (LargestExponentIsInfinite, OUTSIDE),
    (ScaleOfTheNextGroup, OUTSIDE),
    (ScaleOfTheNextRow, OUTSIDE),
    (HalvesTakenForTurns, OUTSIDE),
    (BiasInTurns, OUTSIDE),
    (ScalesInTurns, OUTSIDE),
    (Unquantized, NORM),
    (UnquantizedMxfp4, NORM),
    (QuantizesToMxfp8, NORM),
    (QuantizesTheFirstInputOnly, NORM),
    (FixedLimit, OUTSIDE),
]
#: what the kit calls the fault; nothing where it is none of the usual mistakes
MISTAKES: dict[type[FusedMoEExperts], str] = {
    SwapsCodes: "the two codes of each byte of w13 and w2 are swapped",
    FlushesSubnormals: "subnormal codes of w13 and w2 are read as zero",
    BiasOf128: "the scales of w13 and w2 are half as large",
    LargestExponentIsInfinite: "the e8m0 scales 2**-127 or 2**127 of groups of zeros are misread",
    ScaleOfTheNextGroup: "the scales of w13 are those of another group",
    ScaleOfTheNextRow: "the scales of w2 are those of another row",
    HalvesTakenForTurns: "gate and up rows of w13 are read as interleaved",
    BiasInTurns: "the biases of gate and up are read as interleaved",
    ScalesInTurns: "the scales of gate and up are read as interleaved",
    Unquantized: "the activations are not quantized",
    UnquantizedMxfp4: "the activations are not quantized",
    QuantizesToMxfp8: "the activations are quantized as kMxfp8Dynamic",
    FixedLimit: "the activation's parameters are ignored",
}


@pytest.mark.parametrize("experts", [Sound, Decodes])
def test_sound_experts_pass(experts: type[FusedMoEExperts]) -> None:
    assert not failures(experts)


@pytest.mark.parametrize(("experts", "message"), FAULTS, ids=[experts.__name__ for experts, _ in FAULTS])
def test_fault_is_found(experts: type[FusedMoEExperts], message: str) -> None:
    check_found(experts, message, MISTAKES.get(experts))
