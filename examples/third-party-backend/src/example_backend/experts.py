"""Block-FP8 weights, dequantized once at load: twice the memory, no dequantization per call."""

from __future__ import annotations

from collections.abc import Mapping

import moe_core as mc
import torch
from torch import Tensor


class PreloadedExperts(mc.FusedMoEExpertsModular):
    """16-bit activations times weights that were dequantized to the layer's dtype."""

    # interface version that this class was written for
    interface_api = (1, 0)
    # prefer kernels, but not torch, which dequantizes on every call
    placement = mc.Placement(before=("torch",), after=("triton",))

    claims = mc.Claims(
        devices=(mc.any_device(),),
        keys=((mc.kFp8Static128BlockSym, None),),
        activations=mc.GATED | mc.NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        cuda_graph=False,
        verified_on=("cpu",),
        notes="finds each expert's tokens on the host: no CUDA graphs",
    )

    def convert(self, weights: mc.MoEWeights) -> mc.KernelWeights:
        key = weights.weight_key
        if key is None or weights.w13_scale is None or weights.w2_scale is None:
            raise mc.TensorError("the weights are not quantized")
        config = self.config
        parts = 2 if config.is_gated else 1
        w13 = mc.dequantize_weight(weights.w13, weights.w13_scale, key, parts=parts)
        w2 = mc.dequantize_weight(weights.w2, weights.w2_scale, key)
        # States the selected keys for engines, which read them; apply does not use them.
        quant_config = mc.make_quant_config(
            weight_key=key, activation_key=None, w1_scale=weights.w13_scale, w2_scale=weights.w2_scale
        )
        return mc.KernelWeights(w13=w13.to(config.dtype), w2=w2.to(config.dtype), quant_config=quant_config)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weights: mc.KernelWeights,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        workspace: Mapping[str, Tensor],
        expert_map: Tensor | None = None,
        hidden_states_scale: Tensor | None = None,
        expert_tokens: mc.ExpertTokensMetadata | None = None,
    ) -> None:
        config = self.config
        local = mc.local_expert_ids(topk_ids, config.num_experts, config.local_experts, expert_map)
        total = torch.zeros(output.shape, dtype=torch.float32, device=output.device)
        for expert in local[local >= 0].unique().tolist():
            token, slot = (local == expert).nonzero(as_tuple=True)
            h = hidden_states[token] @ weights.w13[expert].T
            h = mc.apply_moe_activation(config.activation, h, config.params)
            y = h @ weights.w2[expert].T
            total.index_add_(0, token, y.float() * topk_weights[token, slot, None])
        output.copy_(total)
