"""Plain torch: any device, and the real path on a CPU.

Weights are dequantised a block of rows at a time (:mod:`moe_wna16.blocks`).  bfloat16 layers with symmetric int4
weights and bfloat16 scales are multiplied by torch's own CPU product instead, which reads codes
(:mod:`moe_wna16.int4pack`); their weights are laid out for it where this CPU has it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from moe_core import (
    GATED,
    NON_GATED,
    Claims,
    FusedMoEActivationFormat,
    FusedMoEQuantDesc,
    KernelWeights,
    MoEWeights,
    TensorError,
    any_device,
    kFp8DynamicTokenSym,
    kInt4Static,
)
from moe_core.torch_experts import TorchExperts
from torch import Tensor

from moe_wna16 import int4pack
from moe_wna16.blocks import GroupedCodes
from moe_wna16.keys import BASES, every_key, in_order


class TorchWNA16Experts(TorchExperts):
    """Every key of the scheme: zero points, activation order, scaled inputs; int4 with e4m3 activations too."""

    claims = Claims(
        devices=(any_device(),),
        keys=(*((every_key(base), None) for base in BASES), (in_order(kInt4Static), kFp8DynamicTokenSym)),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        lora=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        cuda_graph=False,
        verified_on=("cpu",),
        notes="reads token counts on the host: no CUDA graphs",
    )

    def convert(self, weights: MoEWeights) -> KernelWeights:
        converted = super().convert(weights)
        groups = self._packed_groups()
        if groups is None:
            return converted
        quant = converted.quant_config
        w1_scale, w2_scale = (
            torch.stack([int4pack.scales_and_zeros(one, group, columns) for one in scale])
            for scale, group, columns in (
                (_given(weights.w13_scale, "w13"), groups[0], self.config.hidden_size),
                (_given(weights.w2_scale, "w2"), groups[1], self.config.intermediate_size),
            )
        )
        return replace(
            converted,
            w13=torch.stack([int4pack.pack(codes) for codes in weights.w13]),
            w2=torch.stack([int4pack.pack(codes) for codes in weights.w2]),
            quant_config=replace(quant, w1=replace(quant.w1, scale=w1_scale), w2=replace(quant.w2, scale=w2_scale)),
        )

    def _packed_groups(self) -> tuple[int, int] | None:
        """Columns of a group of w13 and w2 in the layout of torch's CPU product; None where that is not used."""
        key, config = self.weight_key, self.config
        fits = (
            self.device_info.kind == "cpu"
            and key is not None
            and replace(key.with_group(1, 128), pre_scaled=False) == kInt4Static
            and self.activation_key is None
            and config.dtype is torch.bfloat16
        )
        if not fits or key is None:
            return None
        first = int4pack.group_of(key.group_size, config.w13_rows, config.hidden_size)
        second = int4pack.group_of(key.group_size, config.hidden_size, config.intermediate_size)
        if first is None or second is None or not int4pack.available():
            return None
        return first, second

    def product(self, x: Tensor, weights: Tensor, desc: FusedMoEQuantDesc, expert: int, parts: int = 1) -> Tensor:
        scale = _given(desc.scale, "weights'")
        if scale.dim() == 4:
            return int4pack.product(x, weights[expert], scale[expert])
        if desc.key is None:
            raise TensorError("the weights' quant key is missing")
        one = GroupedCodes(
            desc.key,
            weights[expert],
            scale[expert],
            None if desc.zero_point is None else desc.zero_point[expert],
            None if desc.g_idx is None else desc.g_idx[expert],
        )
        return one.product(x)


def _given(scale: Tensor | None, name: str) -> Tensor:
    if scale is None:
        raise TensorError(f"the {name} scale is missing")
    return scale
