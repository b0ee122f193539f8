"""The conformance kit finds what is wrong: experts with one fault each, and the case that must tell."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_core import (
    GATED,
    NON_GATED,
    ActivationParams,
    Claims,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEQuantDesc,
    KernelWeights,
    MoEActivation,
    MoEWeights,
    QuantKey,
    WorkspaceSpec,
    any_device,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
)
from moe_core.interface.experts import FusedMoEExperts
from moe_core.reference.torch_experts import TorchExperts
from moe_core.spec.device import DeviceInfo
from moe_core.testing import Case, run_case
from moe_core_failures import check_found, failures
from torch import Tensor

CLAIMS = Claims(
    devices=(any_device(),),
    keys=((None, None),),
    activations=GATED | NON_GATED,
    bias=True,
    apply_router_weight_on_input=True,
    formats=frozenset(FusedMoEActivationFormat),
    cuda_graph=False,
)
BLOCK_CLAIMS = replace(CLAIMS, keys=((kFp8Static128BlockSym, kFp8Dynamic128Sym),))


class Sound(TorchExperts):
    claims = CLAIMS


class SoundBlock(TorchExperts):
    claims = BLOCK_CLAIMS


class UpBeforeGate(Sound):
    def convert(self, weights: MoEWeights) -> KernelWeights:
        if self.config.is_gated:
            weights = replace(weights, w13=weights.w13.roll(self.config.intermediate_size, dims=1))
        return super().convert(weights)


class NoBias(Sound):
    def convert(self, weights: MoEWeights) -> KernelWeights:
        return super().convert(replace(weights, w13_bias=None, w2_bias=None))


class NoSecondBias(Sound):
    def convert(self, weights: MoEWeights) -> KernelWeights:
        return super().convert(replace(weights, w2_bias=None))


class BiasOfExpertZero(Sound):
    def convert(self, weights: MoEWeights) -> KernelWeights:
        bias = weights.w2_bias
        return super().convert(replace(weights, w2_bias=None if bias is None else bias[:1].expand_as(bias)))


class WeightsOfAllPairs(Sound):
    """Multiplies what pairs without an expert have, which is 0, with their router weights."""

    def apply(self, output: Tensor, *arguments: Any, topk_weights: Tensor, **named: Any) -> None:
        super().apply(output, *arguments, topk_weights=topk_weights, **named)
        output += (0 * topk_weights).sum(1, keepdim=True).to(output.dtype)


class NoExpertMap(Sound):
    def apply(self, *arguments: Any, **named: Any) -> None:
        super().apply(*arguments, **{**named, "expert_map": None})


class MinusOneIsTheLastExpert(Sound):
    def apply(self, *arguments: Any, topk_ids: Tensor, **named: Any) -> None:
        topk_ids = torch.where(topk_ids == -1, self.config.num_experts - 1, topk_ids)
        super().apply(*arguments, topk_ids=topk_ids, **named)


class LargeIdsWrap(Sound):
    def apply(self, *arguments: Any, topk_ids: Tensor, **named: Any) -> None:
        topk_ids = torch.where(topk_ids >= 0, topk_ids % self.config.num_experts, topk_ids)
        super().apply(*arguments, topk_ids=topk_ids, **named)


class CutsIdsToInt32(Sound):
    """Converts before it compares: 2**32 + 1 becomes expert 1."""

    def apply(self, *arguments: Any, topk_ids: Tensor, **named: Any) -> None:
        super().apply(*arguments, topk_ids=topk_ids.int(), **named)


class OnlyMinusOneIsElsewhere(Sound):
    """Reads other negative local ids as counted from the last expert."""

    def apply(self, *arguments: Any, expert_map: Tensor | None = None, **named: Any) -> None:
        if expert_map is not None:
            wrapped = expert_map % self.config.local_experts
            expert_map = torch.where(expert_map < -1, wrapped, expert_map).int()
        super().apply(*arguments, expert_map=expert_map, **named)


class TrustsLocalIds(Sound):
    """Reads whatever lies behind the weights: here, those of the last expert."""

    def apply(self, *arguments: Any, expert_map: Tensor | None = None, **named: Any) -> None:
        if expert_map is not None:
            expert_map = expert_map.clamp(max=self.config.local_experts - 1)
        super().apply(*arguments, expert_map=expert_map, **named)


class LeavesIdleRows(Sound):
    """Rows of tokens without an expert keep what the output held."""

    def apply(self, output: Tensor, *arguments: Any, topk_ids: Tensor, **named: Any) -> None:
        before = output.clone()
        super().apply(output, *arguments, topk_ids=topk_ids, **named)
        if self.activation_format is FusedMoEActivationFormat.STANDARD:
            idle = ((topk_ids < 0) | (topk_ids >= self.config.num_experts)).all(dim=1)
            output[idle] = before[idle]


class AddsToWorkspace(Sound):
    """Accumulates in scratch memory without clearing it."""

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        return (WorkspaceSpec("sum", (num_tokens, self.config.hidden_size), torch.float32),)

    def apply(self, output: Tensor, *arguments: Any, workspace: Mapping[str, Tensor], **named: Any) -> None:
        super().apply(output, *arguments, workspace=workspace, **named)
        if self.activation_format is FusedMoEActivationFormat.STANDARD:
            total = workspace["sum"][: output.shape[0]]
            total += output
            output.copy_(total)


class WritesBehindTheWorkspace(Sound):
    """States half of what it uses."""

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        return (WorkspaceSpec("scratch", (64,), torch.float32),)

    def apply(self, *arguments: Any, workspace: Mapping[str, Tensor], **named: Any) -> None:
        super().apply(*arguments, workspace=workspace, **named)
        scratch = workspace["scratch"]
        if scratch.untyped_storage().nbytes() >= 128 * 4:
            scratch.as_strided((128,), (1,)).fill_(0.5)


class WritesBehindTheOutput(Sound):
    def apply(self, output: Tensor, *arguments: Any, **named: Any) -> None:
        super().apply(output, *arguments, **named)
        end = output.storage_offset() + output.numel()
        if output.untyped_storage().nbytes() > end * output.element_size():
            output.as_strided((1,), (1,), end).fill_(1.0)


class NoLimit(Sound):
    def __init__(self, config: FusedMoEConfig, **named: Any) -> None:
        given = config.activation_params or ActivationParams()
        super().__init__(replace(config, activation_params=replace(given, limit=float("inf"))), **named)


class DefaultParameters(Sound):
    def __init__(self, config: FusedMoEConfig, **named: Any) -> None:
        super().__init__(replace(config, activation_params=None), **named)


class ClaimsMoreActivations(Sound):
    """Computes SILU, whatever is asked for."""

    def __init__(self, config: FusedMoEConfig, **named: Any) -> None:
        activation = MoEActivation.SILU if config.is_gated else MoEActivation.SILU_NO_MUL
        super().__init__(replace(config, activation=activation, activation_params=None), **named)


class WeightsTwice(Sound):
    def apply(self, *arguments: Any, topk_weights: Tensor, **named: Any) -> None:
        super().apply(*arguments, topk_weights=topk_weights.square(), **named)


class WeightsTheResult(Sound):
    """Applies the router weight to the result where it belongs on the input."""

    def __init__(self, config: FusedMoEConfig, **named: Any) -> None:
        super().__init__(replace(config, apply_router_weight_on_input=False), **named)


class SoundUnreduced(Sound):
    """Leaves the router weights and the sum over top-k to finalize."""

    claims = replace(CLAIMS, reduces=False)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weights: KernelWeights,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        **named: Any,
    ) -> None:
        if self.activation_format is FusedMoEActivationFormat.BATCHED:
            named.update(topk_weights=topk_weights, topk_ids=topk_ids)
            super().apply(output, hidden_states, weights, **named)
            return
        router = self.router(topk_weights)
        for slot in range(topk_ids.shape[1]):
            part = output.new_empty(output.shape[0], output.shape[2])
            one = slice(slot, slot + 1)
            super().apply(part, hidden_states, weights, topk_weights=router[:, one], topk_ids=topk_ids[:, one], **named)
            output[:, slot] = part

    def router(self, topk_weights: Tensor) -> Tensor:
        on_input = self.config.apply_router_weight_on_input
        return topk_weights if on_input else torch.ones_like(topk_weights)


class UnreducedWithoutWeights(SoundUnreduced):
    """Leaves the router weight to finalize where it belongs on the input."""

    def router(self, topk_weights: Tensor) -> Tensor:
        return torch.ones_like(topk_weights)


class UnreducedWeightsTwice(SoundUnreduced):
    """Weights the input and the result too."""

    def apply(self, output: Tensor, *arguments: Any, topk_weights: Tensor, **named: Any) -> None:
        super().apply(output, *arguments, topk_weights=topk_weights, **named)
        if self.config.apply_router_weight_on_input and output.dim() == 3 and len(output) == len(topk_weights):
            output.mul_(topk_weights[..., None])


class ReadsFlatRows(Sound):
    """Takes the rows of x to be contiguous."""

    def apply(self, output: Tensor, hidden_states: Tensor, *arguments: Any, **named: Any) -> None:
        flat = hidden_states.as_strided(hidden_states.shape, torch.empty(hidden_states.shape).stride())
        super().apply(output, flat, *arguments, **named)


class ReadsIdsAsInt32(Sound):
    def apply(self, *arguments: Any, topk_ids: Tensor, **named: Any) -> None:
        flat = topk_ids.contiguous().view(torch.int32).flatten()[: topk_ids.numel()].view(topk_ids.shape)
        super().apply(*arguments, topk_ids=flat, **named)


class RoundsTooOften(Sound):
    """Three bits fewer than the dtype has."""

    def apply(self, output: Tensor, *arguments: Any, **named: Any) -> None:
        super().apply(output, *arguments, **named)
        step = torch.exp2(torch.frexp(output.float())[1].float() - 6)
        output.copy_((output.float() / step).round() * step)


class NotDeterministic(Sound):
    """The last bit is a matter of chance, as with atomic sums."""

    def apply(self, output: Tensor, *arguments: Any, **named: Any) -> None:
        super().apply(output, *arguments, **named)
        output.mul_(1 + torch.finfo(output.dtype).eps * (torch.rand(output.shape) < 0.5))


class ChangesInput(Sound):
    def apply(self, output: Tensor, hidden_states: Tensor, *arguments: Any, **named: Any) -> None:
        super().apply(output, hidden_states, *arguments, **named)
        if self.activation_format is FusedMoEActivationFormat.STANDARD:
            hidden_states.mul_(0.5)


class ConvertsInPlace(Sound):
    def convert(self, weights: MoEWeights) -> KernelWeights:
        weights.w2.mul_(0.5)
        return super().convert(replace(weights, w2=weights.w2 * 2))


class ConvertsDifferently(Sound):
    calls = itertools.count()

    def convert(self, weights: MoEWeights) -> KernelWeights:
        converted = super().convert(weights)
        number = torch.tensor([float(next(self.calls))], device=converted.device)
        return replace(converted, extra={"number": number})


class AsksTheDeviceAtConversion(Sound):
    """Looks for the GPU that it converts for."""

    def convert(self, weights: MoEWeights) -> KernelWeights:
        if self.device_info.kind == "cuda":
            DeviceInfo.current("cuda:99")
        return super().convert(weights)


class MovesAtConversion(Sound):
    """Converts where its device is, not where the weights are."""

    def convert(self, weights: MoEWeights) -> KernelWeights:
        return super().convert(weights.to("cpu" if self.device_info.kind == "cpu" else "meta"))


class ReadsWeightsAtConversion(Sound):
    """Keeps a copy of the weights outside of the kernel weights, where reloading does not reach."""

    kept: Tensor | None = None

    def apply(self, output: Tensor, hidden_states: Tensor, weights: KernelWeights, **named: Any) -> None:
        if self.kept is None:
            self.kept = weights.w2.clone()
        super().apply(output, hidden_states, replace(weights, w2=self.kept), **named)


class RefusesEverything(Sound):
    @classmethod
    def extra_reasons(
        cls, config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None, device: DeviceInfo
    ) -> list[str]:
        return ["the moon is not full"]


class RefusesAnActivation(Sound):
    @classmethod
    def extra_reasons(
        cls, config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None, device: DeviceInfo
    ) -> list[str]:
        return ["no GELU today"] * (config.activation is MoEActivation.GELU)


class AcceptsEverything(Sound):
    claims = replace(CLAIMS, bias=False)

    @classmethod
    def is_supported_config(cls, *arguments: Any, **named: Any) -> tuple[bool, str | None]:
        return True, None


class BlocksOfTheFusedMatrix(SoundBlock):
    """Takes the scale rows of w13 to be those of one matrix: wrong where the gate ends within a block."""

    def matrix(self, weights: Tensor, desc: FusedMoEQuantDesc, expert: int, parts: int, cols: int) -> Tensor:
        assert desc.scale is not None
        rows = torch.arange(weights.shape[1], device=weights.device) // 128
        columns = torch.arange(cols, device=weights.device) // 128
        return weights[expert].float() * desc.scale[expert][rows][:, columns]


class ScalesOfTheFirstExpert(SoundBlock):
    def matrix(self, weights: Tensor, desc: FusedMoEQuantDesc, expert: int, parts: int, cols: int) -> Tensor:
        assert desc.scale is not None
        shared = replace(desc, scale=desc.scale[:1].expand_as(desc.scale))
        return super().matrix(weights, shared, expert, parts, cols)


class UnquantizedActivations(SoundBlock):
    """W8A16 where W8A8 was asked for."""

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        return x


class ActivationScalePerToken(SoundBlock):
    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        assert desc.key is not None
        return super().quantized(x, replace(desc, key=desc.key.with_group(1, -1)), scale)


class RequantizesSilently(SoundBlock):
    """Rounds weights once more, to scales of its own, and does not say so."""

    def convert(self, weights: MoEWeights) -> KernelWeights:
        return super().convert(self.coarser(weights))

    @staticmethod
    def coarser(weights: MoEWeights) -> MoEWeights:
        assert weights.w13_scale is not None
        codes = (weights.w13.float() / 1.5).to(weights.w13.dtype)
        return replace(weights, w13=codes, w13_scale=weights.w13_scale * 1.5)


class RequantizesOpenly(RequantizesSilently):
    def requantized(self, weights: MoEWeights) -> MoEWeights:
        return self.coarser(weights)


#: the fault, and what at least one failing case must say
FAULTS: list[tuple[type[FusedMoEExperts], str]] = [
    (UpBeforeGate, "outside their bounds"),
    (NoBias, "outside their bounds"),
    (NoSecondBias, "outside their bounds"),
    (BiasOfExpertZero, "outside their bounds"),
    (NoExpertMap, "outside their bounds"),
    (MinusOneIsTheLastExpert, "outside their bounds"),
    (LargeIdsWrap, "outside their bounds"),
    (CutsIdsToInt32, "outside their bounds"),
    (OnlyMinusOneIsElsewhere, "outside their bounds"),
    (TrustsLocalIds, "outside their bounds"),
    (WeightsOfAllPairs, "depends on router weights of pairs that have no expert here"),
    (LeavesIdleRows, "depends on what output or workspace held before"),
    (AddsToWorkspace, "depends on what output or workspace held before"),
    (WritesBehindTheWorkspace, "bytes behind the workspace"),
    (WritesBehindTheOutput, "behind the output"),
    (NoLimit, "outside their bounds"),
    (DefaultParameters, "outside their bounds"),
    (ClaimsMoreActivations, "outside their bounds"),
    (WeightsTwice, "outside their bounds"),
    (WeightsTheResult, "outside their bounds"),
    (UnreducedWithoutWeights, "outside their bounds"),
    (UnreducedWeightsTwice, "outside their bounds"),
    (ReadsFlatRows, "outside their bounds"),
    (ReadsIdsAsInt32, "outside their bounds"),
    (RoundsTooOften, "the error's norm"),
    (NotDeterministic, "repeated calls differ"),
    (ChangesInput, "apply changed hidden_states"),
    (ConvertsInPlace, "convert changed its input: w2"),
    (ConvertsDifferently, "converting twice gives other weights: number"),
    (AsksTheDeviceAtConversion, "weights can't be converted for sm90, which is not here"),
    (MovesAtConversion, "weights on the CPU, converted for sm90, leave it: w13 (meta)"),
    (ReadsWeightsAtConversion, "after reloading"),
    (RefusesEverything, "every configuration is refused: the moon is not full"),
    (RefusesAnActivation, "every configuration is refused: no GELU today"),
    (AcceptsEverything, "bias is not claimed and must be refused with a reason"),
    (BlocksOfTheFusedMatrix, "outside their bounds"),
    (ScalesOfTheFirstExpert, "outside their bounds"),
    (UnquantizedActivations, "the error's norm"),
    (ActivationScalePerToken, "the error's norm"),
    (RequantizesSilently, "the error's norm"),
]
#: what the kit calls the fault; nothing where it is none of the usual mistakes
MISTAKES: dict[type[FusedMoEExperts], str] = {
    UpBeforeGate: "gate and up rows of w13 are swapped, but not their biases",
    NoBias: "the biases of w13 and w2 are left out",
    NoSecondBias: "the biases of w2 are left out",
    BiasOfExpertZero: "the biases of w2 are those of expert 0",
    NoExpertMap: "the expert map is ignored",
    MinusOneIsTheLastExpert: "negative ids select an expert",
    LargeIdsWrap: "ids beyond the last expert select an expert",
    CutsIdsToInt32: "ids are cut to 32 bits",
    OnlyMinusOneIsElsewhere: "negative local ids count from the last expert",
    TrustsLocalIds: "local ids beyond the last expert select an expert",
    NoLimit: "the clamp limit of the activation is ignored",
    DefaultParameters: "the activation's parameters are ignored",
    ClaimsMoreActivations: "the activation is silu_no_mul",
    WeightsTwice: "the router weight is applied twice",
    WeightsTheResult: "the router weight is on the wrong side",
    UnreducedWithoutWeights: "the router weight is left out",
    UnreducedWeightsTwice: "the router weight is applied twice",
    BlocksOfTheFusedMatrix: "blocks of rows are counted over gate and up as one matrix",
    ScalesOfTheFirstExpert: "the scales of w13 and w2 are those of expert 0",
    UnquantizedActivations: "the activations are not quantized",
    ActivationScalePerToken: "the activations' scales span the whole row",
}


@pytest.mark.parametrize("experts", [Sound, SoundBlock, SoundUnreduced, RequantizesOpenly])
def test_sound_experts_pass(experts: type[FusedMoEExperts]) -> None:
    assert not failures(experts)


@pytest.mark.parametrize(("experts", "message"), FAULTS, ids=[experts.__name__ for experts, _ in FAULTS])
def test_fault_is_found(experts: type[FusedMoEExperts], message: str) -> None:
    check_found(experts, message, MISTAKES.get(experts))


class ThirtyTwoExperts(Sound):
    """Counts experts in a word of 32 bits."""

    def apply(self, output: Tensor, *arguments: Any, topk_ids: Tensor, **named: Any) -> None:
        wrong = (topk_ids >= 32) & (topk_ids < self.config.num_experts)
        super().apply(output, *arguments, topk_ids=torch.where(wrong, topk_ids % 32, topk_ids), **named)


class FourExpertsPerToken(Sound):
    """Adds up a token's first four results."""

    def apply(self, output: Tensor, *arguments: Any, topk_weights: Tensor, **named: Any) -> None:
        weights = topk_weights.clone()
        weights[:, 4:] = 0
        super().apply(output, *arguments, topk_weights=weights, **named)


class ThousandColumns(Sound):
    """Its k loop ends before the last columns of long rows."""

    def apply(self, output: Tensor, hidden_states: Tensor, *arguments: Any, **named: Any) -> None:
        x = hidden_states.clone()
        x[..., 1024 + x.shape[-1] % 64 :] = 0
        super().apply(output, x, *arguments, **named)


@pytest.mark.parametrize("experts", [ThirtyTwoExperts, FourExpertsPerToken, ThousandColumns])
def test_faults_that_need_a_large_layer(experts: type[FusedMoEExperts]) -> None:
    found = failures(experts)
    assert {case.check for case in found} == {"large"}
    assert all("outside their bounds" in text for text in found.values())


class WrongWithManyRows(Sound):
    """Reads the rows of another step in part of the last tile."""

    def apply(self, output: Tensor, *arguments: Any, **named: Any) -> None:
        super().apply(output, *arguments, **named)
        if len(output) >= 512:
            output[-64:, :128] = output[-128:-64, :128]


class ChangesWithManyRows(Sound):
    """A race: the results of repeated calls differ."""

    def apply(self, output: Tensor, *arguments: Any, **named: Any) -> None:
        super().apply(output, *arguments, **named)
        if len(output) >= 512:
            output[-1, 0] = torch.rand(())


class LeavesARowOfMany(Sound):
    """The last row stays what it was, whose old values, taken anew, are mostly the same."""

    def apply(self, output: Tensor, *arguments: Any, **named: Any) -> None:
        old = output[-1].clone()
        super().apply(output, *arguments, **named)
        if len(output) >= 512 and bool(old.isnan().any()):
            output[-1] = old


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (Sound, None),
        (WrongWithManyRows, "norm is"),
        (ChangesWithManyRows, "repeated"),
        (LeavesARowOfMany, "repeated|workspace"),  # what uninitialized memory holds decides which comes first
    ],
)
def test_faults_that_need_many_rows(experts: type[FusedMoEExperts], message: str | None) -> None:
    config = FusedMoEConfig(num_experts=2, top_k=1, hidden_size=256, intermediate_size=64)
    case = Case("many_rows", config, None, None, tokens=512)
    if message is None:
        run_case(experts, case, device="cpu")
    else:
        with pytest.raises(AssertionError, match=message):
            run_case(experts, case, device="cpu")
