"""FlashInfer's `cutlass_fused_moe`: static per-tensor FP8, and block FP8 on sm_90.

`moe_core.kernels.libraries.flashinfer_cutlass` makes the call and defines its layout. The per-tensor scheme needs more:

- x is quantized before the call.
- The rows of gate and up (each separately) and the columns of w2 are zero-padded to a size that the TMA can address.
- The library takes one scale per expert and matrix. If gate and up have different scales, both are requantized with the
  larger one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from moe_core import (
    TRITON,
    KernelWeights,
    MoEWeights,
    TensorError,
    WorkspaceSpec,
    cuda,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kFp8StaticTensorSym,
)
from moe_core.api.experts import quantize_tensor
from moe_core.api.libraries import (
    FlashInferCutlassExperts,
    cutlass_claims,
    pad_matrices,
    quantize_activation,
    swap_halves,
)
from torch import Tensor

from moe_fp8.libraries import FLASHINFER
from moe_fp8.libraries.requantize import expert_slices, rescaled, shared_ratio, shared_scale

_CLAIMS = cutlass_claims(
    "gate and up are quantized anew under the larger of their scales, and x under the largest of the experts' "
    "input scales",
    keys=((kFp8StaticTensorSym, kFp8StaticTensorSym),),
    hidden_multiple=32,
    requires=(FLASHINFER, TRITON),
    verified_on=("NVIDIA H200 (sm90)",),
)


class FlashInferCutlassFp8TensorExperts(FlashInferCutlassExperts):
    """CUTLASS backend for one FP8 scale per expert and matrix, with static activation scales."""

    claims = _CLAIMS

    @property
    def intermediate_size(self) -> int:
        multiple = 16 if self.config.is_gated else 128
        return -(-self.config.intermediate_size // multiple) * multiple

    @property
    def input_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def requantized(self, weights: MoEWeights) -> MoEWeights:
        weights = super().requantized(weights)
        if weights.w13_scale is None or weights.w13_input_scale is None:
            return weights
        w13, w13_scale = shared_scale(weights.w13, weights.w13_scale)
        scale = weights.w13_input_scale
        return replace(
            weights, w13=w13, w13_scale=w13_scale, w13_input_scale=scale.amax().expand_as(scale).contiguous()
        )

    def convert(self, weights: MoEWeights) -> KernelWeights:
        w13_scale, w2_scale = weights.w13_scale, weights.w2_scale
        a1, a2 = weights.w13_input_scale, weights.w2_input_scale
        if w13_scale is None or w2_scale is None or a1 is None or a2 is None:
            raise TensorError(
                "w13_scale, w2_scale, w13_input_scale or w2_input_scale is missing: per-tensor FP8 needs all four"
            )
        w13_scale, ratio = shared_ratio(w13_scale)
        a1 = a1.amax().expand_as(a1)
        size = self.intermediate_size
        w2 = weights.w2
        if size != self.config.intermediate_size:
            w2 = pad_matrices(w2, self.config.hidden_size, size)
        first, second = w13_scale[:, 0].float(), w2_scale[:, 0].float()
        a1, a2 = a1.float(), a2.float()
        return KernelWeights(
            w13=self._w13(weights.w13, ratio),
            w2=w2.contiguous(),
            quant_config=weights.quant_config(
                w1_scale=first.contiguous(),
                w2_scale=second.contiguous(),
                a1_scale=a1.contiguous(),
                a2_scale=a2,
                **self.bias_options(weights),
            ),
            extra={
                "x_scale": a1[0].clone(),
                "dequant_1": (first * a1).contiguous(),
                "quant_2": 1.0 / a2,
                "dequant_2": (second * a2).contiguous(),
                **self.activation_parameters(weights.w13.shape[0], weights.w13.device),
            },
        )

    def _w13(self, w13: Tensor, ratio: Tensor | None) -> Tensor:
        """Multiply gate and up by ``ratio`` [E, 2], pad, and put up first; in chunks of experts."""
        config, size = self.config, self.intermediate_size
        parts, padded = 2 if config.is_gated else 1, size != config.intermediate_size
        if ratio is None and not padded:
            return swap_halves(w13) if parts == 2 else w13.contiguous()
        out = torch.empty(w13.shape[0], parts * size, config.hidden_size, dtype=w13.dtype, device=w13.device)
        for some in expert_slices(w13):
            given = w13[some] if ratio is None else rescaled(w13[some], ratio[some])
            if padded:
                given = pad_matrices(given, size, config.hidden_size, parts=parts)
            if parts == 2:
                swap_halves(given, out=out[some])
            else:
                out[some].copy_(given)
        return out

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        x = WorkspaceSpec("x_values", (num_tokens * self.config.hidden_size,), torch.float8_e4m3fn)
        return (*super().workspaces(num_tokens), x)

    def library_input(
        self, hidden_states: Tensor, weights: KernelWeights, workspace: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        x = workspace["x_values"][: hidden_states.numel()].view(hidden_states.shape)
        quantize_activation(hidden_states, kFp8StaticTensorSym, static_scale=weights.extra["x_scale"].view(1), out=x)
        return {"input": x}

    def quant_scales(self, weights: KernelWeights) -> list[Tensor]:
        return [weights.extra[name] for name in ("dequant_1", "quant_2", "dequant_2", "x_scale")]


class FlashInferCutlassFp8BlockExperts(FlashInferCutlassExperts):
    """CUTLASS backend for 128×128 blocks with 1×128 activation groups; sm_90 only.

    The library quantizes activations itself. It lays out its workspace for the largest call so far of any layer in the
    process and requires that size from then on, so the sizes it reports are not cached. A buffer for the largest number
    of tokens fits every smaller call.
    """

    claims = replace(
        _CLAIMS,
        devices=(cuda(min=90, max=90),),
        keys=((kFp8Static128BlockSym, kFp8Dynamic128Sym),),
        hidden_multiple=128,
        intermediate_multiple=128,
        notes="x between two codes is rounded as its product with 448 / amax says; FlashInfer compiles its kernels "
        "when they are first used",
    )
    sizes_change = True

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "use_deepseek_fp8_block_scale": True}

    def break_ties(self, x: Tensor) -> Tensor:
        wide = x.float()
        groups = wide.reshape(-1, x.shape[1] // 128, 128)
        amax = groups.abs().amax(dim=2, keepdim=True)
        # the library multiplies by 448 / amax
        theirs = (groups * torch.where(amax > 0, 448.0 / amax, 1.0)).to(torch.float8_e4m3fn).float().flatten(1).abs()
        ours = quantize_tensor(wide, kFp8Dynamic128Sym).values.float().abs()
        side: Tensor = (theirs - ours).sign()
        return wide * (1 + 2.0**-21 * side)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        w13_scale, w2_scale = weights.weight_scales
        gated = self.config.is_gated
        return KernelWeights(
            w13=swap_halves(weights.w13) if gated else weights.w13.contiguous(),
            w2=weights.w2.contiguous(),
            quant_config=weights.quant_config(
                w1_scale=swap_halves(w13_scale) if gated else w13_scale.contiguous(),
                w2_scale=w2_scale.contiguous(),
                **self.bias_options(weights),
            ),
            extra=self.activation_parameters(weights.w13.shape[0], weights.w13.device),
        )

    def quant_scales(self, weights: KernelWeights) -> list[Tensor]:
        return list(weights.quant_config.weight_scales)
