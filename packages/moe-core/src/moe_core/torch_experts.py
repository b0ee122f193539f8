"""Experts in plain torch, for any scheme and any device.

Per expert: dequantise its two matrices to float32, quantise the activations as the key says, two
matrix products.  Only experts that have tokens cost anything.  A scheme subclasses
:class:`TorchExperts` with its claims, and overrides :meth:`TorchExperts.matrix` where it reads its weights faster.

Reading the token counts on the host synchronises with a GPU; the claims say ``cuda_graph=False``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_core.activation import apply_moe_activation
from moe_core.config import FusedMoEActivationFormat
from moe_core.errors import TensorError
from moe_core.experts import ExpertTokensMetadata, FusedMoEExpertsModular
from moe_core.quant_config import FusedMoEQuantDesc, make_quant_config
from moe_core.quantization import dequantize_weight, fake_quantize
from moe_core.weights import KernelWeights, MoEWeights


def local_expert_ids(topk_ids: Tensor, num_experts: int, num_local: int, expert_map: Tensor | None) -> Tensor:
    """``topk_ids`` [M, k] as int64 indices of local experts; -1 for ids out of range or living elsewhere."""
    ids = topk_ids.to(torch.int64)
    valid = (ids >= 0) & (ids < num_experts)
    if expert_map is not None:
        ids = expert_map.to(torch.int64)[ids.clamp(0, num_experts - 1)]
        valid &= (ids >= 0) & (ids < num_local)
    else:
        valid &= ids < num_local
    return torch.where(valid, ids, -1)


class TorchExperts(FusedMoEExpertsModular):
    """The computation; subclasses add ``claims``."""

    def convert(self, weights: MoEWeights) -> KernelWeights:
        return KernelWeights(
            w13=weights.w13,
            w2=weights.w2,
            quant_config=make_quant_config(
                weight_key=weights.weight_key,
                activation_key=weights.activation_key,
                w1_scale=weights.w13_scale,
                w2_scale=weights.w2_scale,
                w1_zp=weights.w13_zero_point,
                w2_zp=weights.w2_zero_point,
                w1_bias=weights.w13_bias,
                w2_bias=weights.w2_bias,
                w1_g_idx=weights.w13_g_idx,
                w2_g_idx=weights.w2_g_idx,
                a1_scale=weights.w13_input_scale,
                a2_scale=weights.w2_input_scale,
            ),
        )

    def matrix(self, weights: Tensor, desc: FusedMoEQuantDesc, expert: int, parts: int, cols: int) -> Tensor:
        """One expert's matrix [rows, cols] in float32; ``parts``: stacked matrices with scale rows of their own."""
        one = slice(expert, expert + 1)
        if desc.key is None:
            return weights[expert].float()
        if desc.scale is None:
            raise TensorError(f"the scale of weights quantised as {desc.key} is missing")
        return dequantize_weight(
            weights[one],
            desc.scale[one],
            desc.key,
            parts=parts,
            zero_point=None if desc.zero_point is None else desc.zero_point[one],
            g_idx=None if desc.g_idx is None else desc.g_idx[one],
            cols=cols,
        )[0]

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, expert: int) -> Tensor:
        """``x`` [T, K] float32 as the matrix product sees it: quantised as the activation key says."""
        if desc.key is None:
            # 16-bit activations enter the product in the layer's dtype
            return x.to(self.config.dtype).float()
        return fake_quantize(x, desc.key, scale=None if desc.scale is None else desc.scale[expert])

    def expert(self, x: Tensor, weights: KernelWeights, expert: int) -> Tensor:
        """One expert on its tokens: ``x`` [T, K] float32 -> [T, K] float32, unweighted."""
        config, quant = self.config, weights.quant_config
        w13 = self.matrix(weights.w13, quant.w1, expert, 2 if config.is_gated else 1, config.hidden_size)
        h = F.linear(self.quantized(x, quant.a1, expert), w13)
        if quant.w1_bias is not None:
            h += quant.w1_bias[expert].float()
        h = apply_moe_activation(config.activation, h, config.activation_params)
        w2 = self.matrix(weights.w2, quant.w2, expert, 1, config.intermediate_size)
        y = F.linear(self.quantized(h, quant.a2, expert), w2)
        if quant.w2_bias is not None:
            y += quant.w2_bias[expert].float()
        return y

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
        if self.activation_format is FusedMoEActivationFormat.BATCHED:
            self._apply_batched(output, hidden_states, weights, expert_tokens)
            return
        config = self.config
        top_k = topk_ids.shape[1]
        ids = local_expert_ids(topk_ids, config.num_experts, config.local_experts, expert_map).flatten()
        order = torch.argsort(ids, stable=True)
        counts = torch.bincount(ids + 1, minlength=config.local_experts + 1).tolist()
        result = torch.zeros(output.shape, dtype=torch.float32, device=output.device)
        router = topk_weights.flatten()
        start = counts[0]
        for expert, count in enumerate(counts[1:]):
            if not count:
                continue
            pairs = order[start : start + count]
            start += count
            tokens = pairs // top_k
            x = hidden_states[tokens].float()
            if config.apply_router_weight_on_input:
                y = self.expert(x * router[pairs, None], weights, expert)
            else:
                y = self.expert(x, weights, expert) * router[pairs, None]
            result.index_add_(0, tokens, y)
        output.copy_(result)

    def _apply_batched(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weights: KernelWeights,
        expert_tokens: ExpertTokensMetadata | None,
    ) -> None:
        if expert_tokens is None:
            raise TensorError("expert_tokens is missing: the batched format needs the rows in use per expert")
        output.zero_()
        for expert, count in enumerate(expert_tokens.expert_num_tokens.tolist()):
            if count:
                output[expert, :count] = self.expert(hidden_states[expert, :count].float(), weights, expert)
