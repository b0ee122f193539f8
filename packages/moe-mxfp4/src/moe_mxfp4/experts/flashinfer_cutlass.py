"""FlashInfer's `cutlass_fused_moe` with MXFP4 weights: bf16 on sm_90, MXFP8 on sm_100.

Activations are bfloat16 on sm_90 and MXFP8 on the sm_100 family. `moe_core.kernels.libraries.flashinfer_cutlass` makes
the call. K and N are zero-padded to multiples of 128.

    sm_90   codes are packed and scales folded as in `moe_mxfp4.libraries.hopper_layout`
    sm_100  codes keep their order, scales are stored in tiles of 128 rows and 4 columns; x is quantized before the
            call, the activated values inside it
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from moe_core import (
    TRITON,
    Claims,
    KernelWeights,
    MoEWeights,
    WorkspaceSpec,
    cuda,
    kMxfp4Static,
    kMxfp8Dynamic,
)
from moe_core.api.libraries import (
    FlashInferCutlassExperts,
    by_experts,
    cutlass_claims,
    mxfp8_input,
    mxfp8_workspaces,
    pad_matrices,
    swap_halves,
    trtllm_scales,
)
from torch import Tensor

from moe_mxfp4.groups import GROUP, without_groups
from moe_mxfp4.libraries import FLASHINFER
from moe_mxfp4.libraries.hopper_layout import mixed_gemm_scales, mixed_gemm_weights
from moe_mxfp4.padding import PaddedExperts, round_up


def _claims(notes: str, **own: Any) -> Claims:
    return cutlass_claims(
        f"{notes}; biases are rounded to bfloat16",
        hidden_multiple=GROUP,
        intermediate_multiple=GROUP,
        requires=(FLASHINFER, TRITON),
        **own,
    )


class FlashInferCutlassMxfp4Experts(PaddedExperts, FlashInferCutlassExperts):
    """Shared base of the CUTLASS backends for bfloat16 and MXFP8 activations."""

    #: the library's option for this type of scales
    flag: ClassVar[str]

    @classmethod
    def padded_sizes(cls, hidden_size: int, intermediate_size: int) -> tuple[int, int]:
        return round_up(hidden_size, 128), round_up(intermediate_size, 128)

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, self.flag: True}

    @staticmethod
    @abstractmethod
    def packed(w: Tensor) -> Tensor:
        """Reorder codes [E, rows, columns / 2] for the library; the shape is unchanged.

        Args:
            w: uint8 codes [E, rows, columns / 2].

        Returns:
            uint8 of the same shape.
        """

    @staticmethod
    @abstractmethod
    def folded(scale: Tensor) -> Tensor:
        """Reorder scales [E, rows, columns / 32] for the library.

        Args:
            scale: e8m0 scales [E, rows, columns / 32].

        Returns:
            The scales in the library's layout.
        """

    def convert(self, weights: MoEWeights) -> KernelWeights:
        w13_scale, w2_scale = weights.weight_scales
        hidden, size = self.hidden_size, self.intermediate_size
        return KernelWeights(
            w13=self._converted(weights.w13, size, hidden // 2, gated=self.config.is_gated),
            w2=self._converted(weights.w2, hidden, size // 2),
            quant_config=weights.quant_config(
                w1_scale=self.folded(_padded(w13_scale, size, hidden // GROUP, gated=self.config.is_gated)),
                w2_scale=self.folded(_padded(w2_scale, hidden, size // GROUP)),
                **self.bias_options(weights),
            ),
            extra=self.activation_parameters(weights.w13.shape[0], weights.w13.device),
        )

    def _converted(self, w: Tensor, rows: int, width: int, *, gated: bool = False) -> Tensor:
        """Pad codes [E, R, W] to [E, rows, width] and reorder them for the library.

        Gated weights have twice the rows, up first.
        """

        def step(given: Tensor, target: Tensor) -> None:
            target.copy_(self.packed(_padded(given, rows, width, gated=gated)))

        return by_experts(step, w, w.new_empty(w.shape[0], (2 if gated else 1) * rows, width))


class FlashInferCutlassMxfp4Bf16Experts(FlashInferCutlassMxfp4Experts):
    """CUTLASS backend for MXFP4 weights with bfloat16 activations, on sm_90."""

    claims = _claims(
        "the scale 2^-127 counts as 0; layouts are compared with what FlashInfer's sources write",
        devices=(cuda(min=90, max=90),),
        keys=((kMxfp4Static, None),),
    )
    flag = "use_w4_group_scaling"
    weight_dtype = torch.uint8

    def requantized(self, weights: MoEWeights) -> MoEWeights:
        weights = super().requantized(weights)
        if weights.w13_scale is None or weights.w2_scale is None:
            return weights
        w13 = without_groups(weights.w13, weights.w13_scale.view(torch.uint8) != 0)
        w2 = without_groups(weights.w2, weights.w2_scale.view(torch.uint8) != 0)
        return replace(weights, w13=w13, w2=w2)

    @staticmethod
    def packed(w: Tensor) -> Tensor:
        return mixed_gemm_weights(w)

    @staticmethod
    def folded(scale: Tensor) -> Tensor:
        return mixed_gemm_scales(scale)

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        padded = num_tokens * self.hidden_size if self.hidden_size != self.config.hidden_size else 0
        return (*super().workspaces(num_tokens), WorkspaceSpec("x", (padded,), torch.bfloat16))

    def library_input(
        self, hidden_states: Tensor, weights: KernelWeights, workspace: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        (tokens, columns), hidden = hidden_states.shape, self.hidden_size
        if hidden == columns:
            return super().library_input(hidden_states, weights, workspace)
        x = workspace["x"][: tokens * hidden].view(tokens, hidden)
        x[:, :columns].copy_(hidden_states)
        x[:, columns:].zero_()
        return {"input": x}

    def quant_scales(self, weights: KernelWeights) -> list[Tensor]:
        return list(weights.quant_config.weight_scales)


class FlashInferCutlassMxfp4Mxfp8Experts(FlashInferCutlassMxfp4Experts):
    """CUTLASS backend for MXFP4 weights with MXFP8 activations, on the sm_100 family."""

    claims = _claims(
        "calls are bound against FlashInfer's signatures, and layouts compared with its helpers",
        devices=(cuda(min=100, max=109),),
        keys=((kMxfp4Static, kMxfp8Dynamic),),
    )
    flag = "use_mxfp8_act_scaling"
    weight_dtype = torch.int64

    @staticmethod
    def packed(w: Tensor) -> Tensor:
        return w

    @staticmethod
    def folded(scale: Tensor) -> Tensor:
        return trtllm_scales(scale, torch.arange(scale.shape[1], device="cpu"))

    @property
    def input_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def convert(self, weights: MoEWeights) -> KernelWeights:
        converted = super().convert(weights)
        ones = torch.ones(weights.w13.shape[0], dtype=torch.float32, device=weights.w13.device)
        return replace(converted, extra={**converted.extra, "global_scale": ones})

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        return (*super().workspaces(num_tokens), *mxfp8_workspaces(num_tokens, self.hidden_size))

    def library_input(
        self, hidden_states: Tensor, weights: KernelWeights, workspace: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        x, scale = mxfp8_input(hidden_states, self.hidden_size, workspace)
        return {"input": x, "input_sf": scale, "swizzled_input_sf": False}

    def quant_scales(self, weights: KernelWeights) -> list[Tensor]:
        first, second = (scale.view(torch.int32) for scale in weights.quant_config.weight_scales)
        one = weights.extra["global_scale"]
        return [first, one, second, one]


def _padded(tensor: Tensor, rows: int, width: int, *, gated: bool = False) -> Tensor:
    """Zero-pad codes or scales [E, R, W] of each matrix; if gated, put up first."""
    wide = pad_matrices(tensor, rows, width, parts=2 if gated else 1)
    return swap_halves(wide) if gated else wide
