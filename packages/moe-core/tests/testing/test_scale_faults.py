"""The conformance kit finds mistakes with scales: experts of every FP8 key with one fault each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_core import (
    GATED,
    NON_GATED,
    Claims,
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEQuantDesc,
    KernelWeights,
    MoEActivation,
    MoEWeights,
    any_device,
    apply_moe_activation,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from moe_core.interface.claims import KeyClaim
from moe_core.interface.experts import FusedMoEExperts
from moe_core.reference.torch_experts import TorchExperts
from moe_core_failures import check_found, failures
from torch import Tensor

Keys = tuple[KeyClaim, KeyClaim]
STATIC_TENSOR: Keys = (kFp8StaticTensorSym, kFp8StaticTensorSym)
DYNAMIC_TENSOR: Keys = (kFp8StaticTensorSym, kFp8DynamicTensorSym)
TOKEN: Keys = (kFp8StaticChannelSym, kFp8DynamicTokenSym)
MX: Keys = (kMxfp8Static, kMxfp8Dynamic)


def claims(*keys: Keys, **changed: Any) -> Claims:
    base = Claims(
        devices=(any_device(),),
        keys=keys,
        activations=frozenset({MoEActivation.SILU, MoEActivation.RELU2_NO_MUL}),
        bias=True,
        formats=frozenset(FusedMoEActivationFormat),
        cuda_graph=False,
    )
    return replace(base, **changed)


class Sound(TorchExperts):
    claims = claims(
        STATIC_TENSOR,
        DYNAMIC_TENSOR,
        TOKEN,
        MX,
        (kFp8Static128BlockSym, None),
        (kFp8StaticChannelSym, None),
        (kMxfp8Static, None),
    )


class OneScaleForGateAndUp(TorchExperts):
    """Takes the larger scale for both, as if the weights had been quantized with it."""

    claims = claims(STATIC_TENSOR)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        scale = weights.w13_scale
        assert scale is not None
        largest = scale.amax(dim=1, keepdim=True).expand_as(scale).contiguous()
        return super().convert(replace(weights, w13_scale=largest))


def merged(weights: MoEWeights) -> MoEWeights:
    """Gate and up under the larger of their scales."""
    scale, codes = weights.w13_scale, weights.w13
    assert scale is not None
    halves = codes.float().view(len(codes), scale.shape[1], -1, codes.shape[2])
    largest = scale.amax(dim=1, keepdim=True)
    rounded = (halves * (scale / largest)[..., None, None]).reshape(codes.shape).to(codes.dtype)
    return replace(weights, w13=rounded, w13_scale=largest.expand_as(scale).contiguous())


class Requantizes(TorchExperts):
    """Merges the scales of gate and up by quantizing once more, and does not say so."""

    claims = claims((kFp8StaticTensorSym, None))

    def convert(self, weights: MoEWeights) -> KernelWeights:
        return super().convert(merged(weights))


class SaysThatItRequantizes(Requantizes):
    def requantized(self, weights: MoEWeights) -> MoEWeights:
        return merged(weights)


class RequantizesFurtherOff(TorchExperts):
    """Says that it computes with weights that no rounding explains."""

    claims = claims(STATIC_TENSOR)

    def requantized(self, weights: MoEWeights) -> MoEWeights:
        return replace(weights, w2=weights.w2.roll(1, dims=1))

    def convert(self, weights: MoEWeights) -> KernelWeights:
        return super().convert(self.requantized(weights))


class MovesBiases(TorchExperts):
    """Says that it computes with biases that no rounding explains."""

    claims = claims(STATIC_TENSOR)

    def requantized(self, weights: MoEWeights) -> MoEWeights:
        if weights.w2_bias is None:
            return weights
        return replace(weights, w2_bias=weights.w2_bias * 1.01)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        return super().convert(self.requantized(weights))


class MovesHiddenStates(TorchExperts):
    """Says that it computes with other hidden states."""

    claims = claims(TOKEN)

    def break_ties(self, x: Tensor) -> Tensor:
        return x * 1.001


class RequantizesToWeightOnly(TorchExperts):
    """Says that it leaves activations as they are."""

    claims = claims(TOKEN)

    def requantized(self, weights: MoEWeights) -> MoEWeights:
        return replace(weights, activation_key=None)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        return super().convert(weights)

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        return x.to(self.config.dtype).float()


class InputScaleOfTheFirstExpert(TorchExperts):
    claims = claims(STATIC_TENSOR)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        scale = weights.w13_input_scale
        assert scale is not None
        return super().convert(replace(weights, w13_input_scale=scale[:1].expand_as(scale).contiguous()))


class LargestSecondInputScale(TorchExperts):
    claims = claims(STATIC_TENSOR)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        scale = weights.w2_input_scale
        assert scale is not None
        return super().convert(replace(weights, w2_input_scale=scale.amax().expand_as(scale).contiguous()))


class SaysThatInputScalesAreShared(LargestSecondInputScale):
    def requantized(self, weights: MoEWeights) -> MoEWeights:
        scale = weights.w2_input_scale
        assert scale is not None
        return replace(weights, w2_input_scale=scale.amax().expand_as(scale).contiguous())


class TensorScalePerExpert(TorchExperts):
    """Quantizes each expert's hidden values by themselves where one scale spans all."""

    claims = claims(DYNAMIC_TENSOR)

    def first(self, x: Tensor, weights: KernelWeights, expert: int, added: Tensor | None = None) -> Tensor:
        h = super().first(x, weights, expert)
        return super().quantized(h, weights.quant_config.a2)

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        return super().quantized(x, desc, scale) if x.shape[1] == self.config.hidden_size else x


class TensorScaleOfAllTokens(TorchExperts):
    """Its scale depends on tokens without an expert on this rank."""

    claims = claims(DYNAMIC_TENSOR)
    largest: Tensor

    def apply(self, output: Tensor, hidden_states: Tensor, *arguments: Any, **named: Any) -> None:
        self.largest = hidden_states.abs().max().float()
        super().apply(output, hidden_states, *arguments, **named)

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        if x.shape[1] == self.config.hidden_size and self.config.activation_format is FusedMoEActivationFormat.STANDARD:
            scale = self.largest / 448
        return super().quantized(x, desc, scale)


class LosesNan(TorchExperts):
    """A NaN becomes 0, as codes of integers have it."""

    claims = claims(STATIC_TENSOR)

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        return super().quantized(x, desc, scale).nan_to_num(0.0)


class LosesNanWeights(TorchExperts):
    """Leaves pairs out whose router weight compares with nothing."""

    claims = claims(STATIC_TENSOR, formats=frozenset({FusedMoEActivationFormat.STANDARD}))

    def apply(self, output: Tensor, *arguments: Any, topk_weights: Tensor, **named: Any) -> None:
        super().apply(output, *arguments, topk_weights=topk_weights.nan_to_num(0.0), **named)


class SpreadsNan(TorchExperts):
    """Its scale for all tokens spans what is not finite."""

    claims = claims(DYNAMIC_TENSOR)

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        return super().quantized(x, desc, scale) + 0 * x.sum()


class TensorScaleOfUnusedRows(TorchExperts):
    """In the batched format, its scale depends on what unused rows hold."""

    claims = claims(DYNAMIC_TENSOR, formats=frozenset({FusedMoEActivationFormat.BATCHED}))

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weights: KernelWeights,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        workspace: Mapping[str, Tensor],
        expert_map: Tensor | None = None,
        hidden_states_scale: Tensor | None = None,
        expert_tokens: ExpertTokensMetadata | None = None,
    ) -> None:
        assert expert_tokens is not None
        everything = replace(
            expert_tokens, expert_num_tokens=torch.full_like(expert_tokens.expert_num_tokens, hidden_states.shape[1])
        )
        super().apply(
            output,
            hidden_states,
            weights,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            workspace=workspace,
            expert_tokens=everything,
        )


class TokenScaleAsTensorScale(TorchExperts):
    claims = claims(TOKEN)

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        return super().quantized(x, replace(desc, key=kFp8DynamicTensorSym), scale)


class ChannelScalesOfTheFirstRow(TorchExperts):
    claims = claims(TOKEN)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        scale = weights.w2_scale
        assert scale is not None
        return super().convert(replace(weights, w2_scale=scale[:, :1].expand_as(scale).contiguous()))


class MxScaleOfTheNextGroup(TorchExperts):
    claims = claims(MX)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        scale = weights.w13_scale
        assert scale is not None
        return super().convert(replace(weights, w13_scale=scale.roll(1, dims=2)))


class MxScaleOfTheNextRow(TorchExperts):
    claims = claims((kMxfp8Static, None))

    def convert(self, weights: MoEWeights) -> KernelWeights:
        scale = weights.w2_scale
        assert scale is not None
        return super().convert(replace(weights, w2_scale=scale.roll(1, dims=1)))


class MxScaleRoundedDown(TorchExperts):
    """The activation's scale is the power of two below amax / 448, where the key's rule takes the one above."""

    claims = claims(MX)

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        from moe_core.reference.quantization import quantize_tensor

        if not x.numel():
            return x
        assert desc.key is not None
        own = quantize_tensor(x, desc.key).scale
        return super().quantized(x, desc, (own - 1).to(torch.uint8))


class LargestExponentIsInfinite(TorchExperts):
    """Puts the e8m0 code plus one into the exponent: 2**127 becomes infinite."""

    claims = claims((kMxfp8Static, None))

    def matrix(self, weights: Tensor, desc: FusedMoEQuantDesc, expert: int, parts: int, cols: int) -> Tensor:
        assert desc.scale is not None
        shifted = ((desc.scale[expert].int() + 1) << 23).view(torch.float32) / 2
        return weights[expert].float() * shifted.repeat_interleave(32, dim=1)[:, :cols]


class FlushesSubnormalCodes(TorchExperts):
    """Reads e4m3 codes below 2**-6 as zero."""

    claims = claims((kFp8StaticTensorSym, None))

    def convert(self, weights: MoEWeights) -> KernelWeights:
        flushed = {name: self.normal(tensor) for name, tensor in (("w13", weights.w13), ("w2", weights.w2))}
        return super().convert(replace(weights, **flushed))

    @staticmethod
    def normal(codes: Tensor) -> Tensor:
        raw = codes.view(torch.uint8)
        return torch.where(raw & 0x78 != 0, raw, 0).view(codes.dtype)


class NoLimitBeforeTheQuantizer(TorchExperts):
    claims = claims(TOKEN, activations=frozenset({MoEActivation.SWIGLUOAI}))

    def first(self, x: Tensor, weights: KernelWeights, expert: int, added: Tensor | None = None) -> Tensor:
        config, given = self.config, self.config.params
        self.config = replace(config, activation_params=replace(given, limit=float("inf")))
        h = super().first(x, weights, expert)
        self.config = config
        return h


class GatesWhatHasNoGate(TorchExperts):
    """Takes half of the rows for a gate: the matrix product's result is as wide as w13 has rows."""

    claims = claims(MX, activations=NON_GATED)

    def first(self, x: Tensor, weights: KernelWeights, expert: int, added: Tensor | None = None) -> Tensor:
        h = super().first(x, weights, expert)
        half = h.shape[1] // 2
        gated = apply_moe_activation(MoEActivation.SILU, h[:, : 2 * half])
        return torch.cat([gated, gated, h[:, 2 * half :]], dim=1)


class IgnoresTheGate(TorchExperts):
    claims = claims(TOKEN, activations=GATED)

    def first(self, x: Tensor, weights: KernelWeights, expert: int, added: Tensor | None = None) -> Tensor:
        config = self.config
        up = super().matrix(weights.w13, weights.quant_config.w1, expert, 2, config.hidden_size)
        z = x @ up[: config.intermediate_size].T
        return apply_moe_activation(MoEActivation.SILU_NO_MUL, z)


class BiasBeforeTheScale(TorchExperts):
    """Adds the bias to the product of codes, so that the channel scales apply to it."""

    claims = claims((kFp8StaticChannelSym, None))

    def convert(self, weights: MoEWeights) -> KernelWeights:
        bias, scale = weights.w2_bias, weights.w2_scale
        assert scale is not None
        return super().convert(replace(weights, w2_bias=None if bias is None else bias * scale[..., 0]))


class UnquantizedActivations(TorchExperts):
    """W8A16 where W8A8 was asked for: nearer to the weights' truth, further from what was asked for."""

    claims = claims(DYNAMIC_TENSOR)

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        return x.to(self.config.dtype).float()


class UnquantizedTokens(UnquantizedActivations):
    claims = claims(TOKEN)


class UnquantizedStatic(UnquantizedActivations):
    claims = claims(STATIC_TENSOR)


class UnquantizedMx(UnquantizedActivations):
    claims = claims(MX)


class QuantizedSecondInputOnly(TorchExperts):
    claims = claims(TOKEN)

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        return super().quantized(x, desc, scale) if x.shape[1] == self.config.intermediate_size else x


class QuantizesForWeightOnly(TorchExperts):
    """W8A8 where W8A16 was asked for."""

    claims = claims((kFp8StaticChannelSym, None), (kFp8Static128BlockSym, None))

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        return super().quantized(x, replace(desc, key=kFp8Dynamic128Sym), scale)


class KeepsInputScales(TorchExperts):
    """Reads static scales at its first call, where reloading does not reach."""

    claims = claims(STATIC_TENSOR)
    kept: Tensor | None = None

    def apply(self, output: Tensor, hidden_states: Tensor, weights: KernelWeights, **named: Any) -> None:
        quant = weights.quant_config
        if self.kept is None and quant.a1.scale is not None:
            self.kept = quant.a1.scale.clone()
        old = replace(quant, a1=replace(quant.a1, scale=self.kept))
        super().apply(output, hidden_states, replace(weights, quant_config=old), **named)


class DependsOnTheBatch(TorchExperts):
    """Claims batch invariance, and adds a little of the others to the first token."""

    claims = claims(TOKEN, batch_invariant=True)

    def apply(self, output: Tensor, hidden_states: Tensor, weights: KernelWeights, **named: Any) -> None:
        super().apply(output, hidden_states, weights, **named)
        output[:1] += 0.01 * output[1:].sum(dim=0)


class SharesAScale(TorchExperts):
    """Claims batch invariance with a scale that spans the batch alone."""

    claims = claims(DYNAMIC_TENSOR, batch_invariant=True)


class RefusesBatchInvariance(TorchExperts):
    claims = claims(TOKEN, batch_invariant=True)

    @classmethod
    def extra_reasons(cls, config: Any, *arguments: Any) -> list[str]:
        return ["sums in any order"] * config.batch_invariant


OUTSIDE, NORM = "outside their bounds", "the error's norm"
#: the fault, and what at least one failing case must say
FAULTS: list[tuple[type[FusedMoEExperts], str]] = [
    (OneScaleForGateAndUp, OUTSIDE),
    (Requantizes, NORM),
    (RequantizesFurtherOff, "requantized w2 of expert 0 is further off than one rounding explains"),
    (MovesBiases, "requantized w2_bias is further off than rounding to torch."),
    (MovesHiddenStates, "break_ties moves hidden states by more than 2**-20 of themselves"),
    (RequantizesToWeightOnly, "requantized activations are None, asked for was kFp8DynamicTokenSym"),
    (InputScaleOfTheFirstExpert, NORM),
    (LargestSecondInputScale, NORM),
    (TensorScalePerExpert, NORM),
    (TensorScaleOfAllTokens, NORM),
    (LosesNan, "of the result of a token with a NaN are no NaN"),
    (LosesNanWeights, "of the result of a token whose router weight is NaN are no NaN"),
    (SpreadsNan, "the result of tokens beside one with a NaN"),
    (TensorScaleOfUnusedRows, OUTSIDE),
    (TokenScaleAsTensorScale, NORM),
    (ChannelScalesOfTheFirstRow, OUTSIDE),
    (MxScaleOfTheNextGroup, OUTSIDE),
    (MxScaleOfTheNextRow, OUTSIDE),
    (MxScaleRoundedDown, NORM),
    (LargestExponentIsInfinite, OUTSIDE),
    (FlushesSubnormalCodes, OUTSIDE),
    (NoLimitBeforeTheQuantizer, OUTSIDE),
    (GatesWhatHasNoGate, OUTSIDE),
    (IgnoresTheGate, OUTSIDE),
    (BiasBeforeTheScale, OUTSIDE),
    (UnquantizedActivations, NORM),
    (UnquantizedTokens, NORM),
    (UnquantizedStatic, NORM),
    (UnquantizedMx, NORM),
    (QuantizedSecondInputOnly, NORM),
    (QuantizesForWeightOnly, NORM),
    (KeepsInputScales, "after reloading"),
    (DependsOnTheBatch, "are others alone than among "),
    (
        SharesAScale,
        "batch invariance is claimed, but: is not batch invariant with a dynamic scale that",
    ),
    (RefusesBatchInvariance, "batch invariance is claimed, but: "),
]
#: what the kit calls the fault; nothing where it is none of the usual mistakes
MISTAKES: dict[type[FusedMoEExperts], str] = {
    OneScaleForGateAndUp: "gate and up have one scale for both",
    InputScaleOfTheFirstExpert: "the input scales of w13 are those of expert 0",
    LargestSecondInputScale: "the input scales of w2 are the largest of all experts",
    ChannelScalesOfTheFirstRow: "the scales of w2 are those of the first row",
    MxScaleOfTheNextGroup: "the scales of w13 are those of another group",
    MxScaleOfTheNextRow: "the scales of w2 are those of another row",
    LargestExponentIsInfinite: "the e8m0 scales 2**-127 or 2**127 of groups of zeros are misread",
    FlushesSubnormalCodes: "subnormal codes of w13 and w2 are read as zero",
    NoLimitBeforeTheQuantizer: "the clamp limit of the activation is ignored",
    BiasBeforeTheScale: "the biases of w2 are multiplied by the scales",
    UnquantizedActivations: "the activations are not quantized",
    UnquantizedTokens: "the activations are not quantized",
    UnquantizedStatic: "the activations are not quantized",
    TokenScaleAsTensorScale: "the activations' scales span the whole tensor",
    UnquantizedMx: "the activations are not quantized",
    QuantizesForWeightOnly: "the activations are quantized as kFp8Dynamic128Sym",
}


@pytest.mark.parametrize("experts", [Sound, SaysThatItRequantizes, SaysThatInputScalesAreShared])
def test_sound_experts_pass(experts: type[FusedMoEExperts]) -> None:
    assert not failures(experts)


@pytest.mark.parametrize(("experts", "message"), FAULTS, ids=[experts.__name__ for experts, _ in FAULTS])
def test_fault_is_found(experts: type[FusedMoEExperts], message: str) -> None:
    check_found(experts, message, MISTAKES.get(experts))
