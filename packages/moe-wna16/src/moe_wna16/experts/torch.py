"""Plain torch: any device, and the production path on CPUs.

Weights are dequantized one block of rows at a time (:mod:`moe_wna16.blocks`). bfloat16 layers instead use torch's CPU
product of 4-bit weights, which reads codes (:mod:`moe_wna16.int4pack`), with int8 split into two parts. Their weights
are converted to its layout if the CPU supports it and the sizes fit, with columns sorted by group.
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
    QuantKey,
    TensorError,
    TorchExperts,
    any_device,
    kFp8DynamicTokenSym,
    kInt4Static,
)
from torch import Tensor

from moe_wna16 import int4pack
from moe_wna16.blocks import GroupedCodes
from moe_wna16.keys import BASES, every_key, in_order


class TorchWNA16Experts(TorchExperts):
    """Every key of the scheme: zero points, activation order, scaled inputs, int4 with e4m3."""

    claims = Claims(
        devices=(any_device(),),
        keys=(*((every_key(base), None) for base in BASES), (in_order(kInt4Static), kFp8DynamicTokenSym)),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        lora=True,
        batch_invariant=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        cuda_graph=False,
        verified_on=("cpu",),
        notes="reads token counts on the host: no CUDA graphs",
    )

    def convert(self, weights: MoEWeights) -> KernelWeights:
        converted = super().convert(weights)
        groups, key = self._packed_groups(), weights.weight_key
        if groups is None or key is None:
            return converted
        (first, second), given = groups, converted.quant_config
        w13, w1 = _packed(weights.w13, given.w1, key, first)
        w2, w2_desc = _packed(weights.w2, given.w2, key, second)
        return replace(converted, w13=w13, w2=w2, quant_config=replace(given, w1=w1, w2=w2_desc))

    def _packed_groups(self) -> tuple[int, int] | None:
        """Return the group sizes of w13 and w2 for torch's CPU GEMM, or None if it is not used."""
        key, config = self.weight_key, self.config
        if key is None or self.activation_key is not None:
            return None
        if self.device_info.kind != "cpu" or config.dtype is not torch.bfloat16:
            return None
        sizes = (config.w13_rows, config.hidden_size), (config.hidden_size, config.intermediate_size)
        first, second = (int4pack.group_of(key.group_size, *size, permuted=key.permuted) for size in sizes)
        if first is None or second is None or not int4pack.available():
            return None
        return first, second

    def product(self, x: Tensor, weights: Tensor, desc: FusedMoEQuantDesc, expert: int, parts: int = 1) -> Tensor:
        scale = _given(desc.scale)
        if scale.dim() == 5:
            if desc.g_idx is not None:  # g_idx holds the column order here, with padding positions
                x = torch.cat((x, x.new_zeros(len(x), 1)), dim=1).index_select(1, desc.g_idx[expert])
            return int4pack.product(x, weights[expert], scale[expert])
        if desc.key is None:
            raise TensorError("weight_key is None, expected a quantized weight key")
        one = GroupedCodes(
            desc.key,
            weights[expert],
            scale[expert],
            None if desc.zero_point is None else desc.zero_point[expert],
            None if desc.g_idx is None else desc.g_idx[expert],
        )
        return one.product(x)


def _packed(codes: Tensor, desc: FusedMoEQuantDesc, key: QuantKey, group: int) -> tuple[Tensor, FusedMoEQuantDesc]:
    """Convert w13 or w2 for torch's CPU GEMM; ``g_idx`` becomes the order of the columns."""
    scale, bits = _given(desc.scale), key.dtype.bits
    packed, scales, orders = [], [], []
    for expert, one in enumerate(codes):
        own = scale[expert]
        zero_point = None if desc.zero_point is None else desc.zero_point[expert]
        order = None
        if desc.g_idx is not None:
            order, of_block = int4pack.column_blocks(desc.g_idx[expert], own.shape[1])
            own = own.index_select(1, of_block)
            zero_point = None if zero_point is None else zero_point.index_select(1, of_block)
            orders.append(order)
        tiles, added = int4pack.pack(one, bits, group, order)
        packed.append(tiles)
        scales.append(int4pack.scales_and_zeros(own, zero_point, bits, added))
    g_idx = torch.stack(orders) if orders else None
    return torch.stack(packed), replace(desc, scale=torch.stack(scales), zero_point=None, g_idx=g_idx)


def _given(scale: Tensor | None) -> Tensor:
    if scale is None:
        raise TensorError("scale is missing, but the weights are quantized")
    return scale
