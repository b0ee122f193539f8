"""Experts in plain torch, for any scheme and any device.

For each expert, the two matrices are dequantized to float32 and the activations are quantized as the key specifies,
followed by two matrix products. Scales of whole rows are applied to the products, which have fewer elements. Only
experts with tokens cost anything. A scheme subclasses :class:`TorchExperts` with its claims, and overrides
:meth:`TorchExperts.matrix` if it can read its weights faster.

Dynamic scales are those of :mod:`moe_core.reference.fused_moe`. Tokens are quantized once, before they are
distributed to experts, unless every expert has different input factors. A per-tensor scale covers the tokens, then
the pairs, that this rank computes, so the first products of all experts come first.

Batch-invariant layers process every token, or batched row, separately.

The host reads the token counts and so synchronizes with the GPU; the claims therefore set ``cuda_graph=False``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_core._support.e4m3 import decode_e4m3
from moe_core.errors import TensorError, check_shape, check_tensor
from moe_core.interface.experts import ExpertTokensMetadata, FusedMoEExpertsModular
from moe_core.reference.quantization import Quantized, dequantize_tensor, dequantize_weight, fake_quantize, scale_values
from moe_core.spec.activation import apply_moe_activation
from moe_core.spec.config import FusedMoEActivationFormat, whole_number
from moe_core.spec.lora import LoRA, LoRAWeights, lora_product
from moe_core.spec.numerics import NumberKind
from moe_core.spec.quant_config import FusedMoEQuantDesc
from moe_core.spec.weights import KernelWeights, MoEWeights


def local_expert_ids(topk_ids: Tensor, num_experts: int, num_local: int, expert_map: Tensor | None) -> Tensor:
    """Convert global expert ids to indices of local experts.

    Args:
        topk_ids: [M, k].
        num_experts: Number of experts E over all ranks.
        num_local: Number of experts on this rank.
        expert_map: [E], local index of each global expert, or None.

    Returns:
        [M, k] int64; -1 for ids that are out of range or on another rank.
    """
    check_tensor("topk_ids", topk_ids)
    whole_number("num_experts", num_experts)
    whole_number("num_local", num_local, 0)
    if expert_map is not None:
        check_shape("expert_map", expert_map, (num_experts,))
    ids = topk_ids.to(torch.int64)
    valid = (ids >= 0) & (ids < num_experts)
    if expert_map is not None:
        ids = expert_map.to(torch.int64)[ids.clamp(0, num_experts - 1)]
        valid &= (ids >= 0) & (ids < num_local)
    else:
        valid &= ids < num_local
    return torch.where(valid, ids, -1)


class TorchExperts(FusedMoEExpertsModular):
    """Experts in plain torch operations for any device; a scheme's subclass adds ``claims``."""

    def convert(self, weights: MoEWeights) -> KernelWeights:
        return KernelWeights(w13=weights.w13, w2=weights.w2, quant_config=weights.quant_config())

    def product(self, x: Tensor, weights: Tensor, desc: FusedMoEQuantDesc, expert: int, parts: int = 1) -> Tensor:
        """Multiply rows by one expert's matrix, without the bias.

        Args:
            x: [R, cols] float32.
            weights: Matrices of all experts.
            desc: Quantization of the weights.
            expert: Local expert.
            parts: Number of stacked matrices with separate scale rows.

        Returns:
            [R, rows] float32.
        """
        key = desc.key
        whole_rows = key is not None and key.symmetric and key.group_shape.col == -1 and key.group_shape.row in (1, -1)
        whole_rows = whole_rows and desc.scale2 is None
        if not whole_rows or desc.scale is None or weights.dtype not in (torch.float8_e4m3fn, torch.int8):
            w = self.matrix(weights, desc, expert, parts, x.shape[1])
            if not _beyond_float32(w, desc, expert):
                return F.linear(x, w)
            return F.linear(x.double(), _dequantized(weights, desc, expert, parts, x.shape[1], torch.float64)).float()
        codes = weights[expert]
        y = F.linear(x, decode_e4m3(codes) if codes.dtype is torch.float8_e4m3fn else codes.float())
        scale = desc.scale[expert].float().view(-1, 1)  # one per row, or one per part
        y.view(len(x), len(scale), y.shape[1] // len(scale)).mul_(scale)
        return y

    def matrix(self, weights: Tensor, desc: FusedMoEQuantDesc, expert: int, parts: int, cols: int) -> Tensor:
        """Dequantize one expert's matrix.

        A code times its scale can overflow float32 and is infinite here; :meth:`product` then uses float64 instead.

        Args:
            weights: Matrices of all experts.
            desc: Quantization of the weights.
            expert: Local expert.
            parts: Number of stacked matrices with separate scale rows.
            cols: Number of columns.

        Returns:
            [rows, cols] float32.
        """
        if desc.key is None:
            return weights[expert].float()
        return _dequantized(weights, desc, expert, parts, cols, torch.float32)

    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        """Quantize and dequantize rows as the activation key specifies.

        Args:
            x: [R, K] float32: one expert's rows with ``scale``, else all rows that a scale may cover.
            desc: Quantization of the activations; with ``scale``, of that expert, including its zero point.
            scale: Scale of one expert, for a static key.

        Returns:
            [R, K] float32, as it enters the matrix product.
        """
        if desc.key is None:
            # 16-bit activations enter the product in the layer's dtype.
            return x.to(self.config.dtype).float()
        zero_point = None if scale is None else desc.zero_point
        return fake_quantize(x, desc.key, scale=scale, zero_point=zero_point, scale2=desc.scale2)

    def first(self, x: Tensor, weights: KernelWeights, expert: int, added: Tensor | None = None) -> Tensor:
        """Compute the activated values of one expert.

        Args:
            x: [R, K] float32.
            weights: Kernel weights.
            expert: Local expert.
            added: [R, 2N] from adapters, or None.

        Returns:
            [R, N] float32.
        """
        config, quant = self.config, weights.quant_config
        h = self.product(x, weights.w13, quant.w1, expert, 2 if config.is_gated else 1)
        if quant.w1_bias is not None:
            h += quant.w1_bias[expert].float()
        if added is not None:
            h += added
        return apply_moe_activation(config.activation, h, config.activation_params)

    def second(self, h: Tensor, weights: KernelWeights, expert: int) -> Tensor:
        """Compute the unweighted results of one expert.

        Args:
            h: [R, N] float32, activated values.
            weights: Kernel weights.
            expert: Local expert.

        Returns:
            [R, K] float32.
        """
        quant = weights.quant_config
        y = self.product(h, weights.w2, quant.w2, expert)
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
        lora: LoRA | None = None,
    ) -> None:
        if self.activation_format is FusedMoEActivationFormat.BATCHED:
            self._apply_batched(output, hidden_states, weights, expert_tokens, lora)
            return
        config = self.config
        if config.batch_invariant and len(hidden_states) > 1:
            # Products of other sizes, or at other positions within a product, use different instructions.
            for token in range(len(hidden_states)):
                one = slice(token, token + 1)
                self.apply(
                    output[one],
                    hidden_states[one],
                    weights,
                    topk_weights=topk_weights[one],
                    topk_ids=topk_ids[one],
                    workspace=workspace,
                    expert_map=expert_map,
                    hidden_states_scale=None if hidden_states_scale is None else hidden_states_scale[one],
                    lora=None if lora is None else replace(lora, adapter_ids=lora.adapter_ids[one]),
                )
            return
        ids = local_expert_ids(topk_ids, config.num_experts, config.local_experts, expert_map).flatten()
        counts = torch.bincount(ids + 1, minlength=config.local_experts + 1).tolist()
        pairs = torch.argsort(ids, stable=True)[counts[0] :]
        tokens, rows = torch.unique(pairs // topk_ids.shape[1], return_inverse=True)
        x, scale = hidden_states[tokens], None
        if hidden_states_scale is None:
            x = x.float()
        else:
            scale = hidden_states_scale[tokens]
        router = topk_weights.flatten()[pairs, None]
        if config.apply_router_weight_on_input:
            x = x * topk_weights[tokens]
        result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        adapters = None if lora is None else Adapters(lora.weights, lora.adapter_ids[tokens][rows])
        for place, y in self.results(x, rows, counts[1:], weights, adapters, scale):
            if not config.apply_router_weight_on_input:
                y = y * router[place]
            result.index_add_(0, rows[place], y)
        output.zero_()
        output[tokens] = result.to(output.dtype)

    def _apply_batched(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weights: KernelWeights,
        expert_tokens: ExpertTokensMetadata | None,
        lora: LoRA | None,
    ) -> None:
        counts = ExpertTokensMetadata.rows_in_use(expert_tokens)
        in_use = torch.arange(hidden_states.shape[1], device=counts.device) < counts[:, None]
        every = in_use.flatten().nonzero().flatten()
        output.zero_()
        # Same dynamic scales as in the standard format.
        for used in torch.split(every, 1 if self.config.batch_invariant else max(len(every), 1)):
            x = hidden_states.flatten(0, 1)[used].float()
            rows = torch.arange(len(used), device=used.device)
            own = torch.bincount(used // hidden_states.shape[1], minlength=len(counts)).tolist()
            adapters = None if lora is None else Adapters(lora.weights, lora.adapter_ids.flatten()[used])
            for place, y in self.results(x, rows, own, weights, adapters):
                output.view(-1, output.shape[2])[used[place]] = y.to(output.dtype)

    def results(
        self,
        x: Tensor,
        rows: Tensor,
        counts: list[int],
        weights: KernelWeights,
        adapters: Adapters | None,
        scale: Tensor | None = None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Compute unweighted results, expert by expert.

        Args:
            x: [T, K] float32, every row in use; codes if ``scale`` is given.
            rows: [P], the row of ``x`` of each pair, sorted by expert.
            counts: Number of pairs per expert.
            weights: Kernel weights.
            adapters: Adapters of the pairs, or None.
            scale: [T, groups], if ``x`` is already quantized.

        Yields:
            Position of an expert's pairs among all pairs, and their results [R, K] float32.
        """
        quant = weights.quant_config
        key = quant.a1.key
        static = key is not None and key.is_static
        groups = expert_slices(counts)
        # A per-tensor scale requires quantization before the rows are distributed to experts.
        together = key is not None and not static and key.spans_tokens
        before = together or not (static or quant.w1.pre_scale is not None)
        plain = x
        if before and groups and quant.w1.pre_scale is not None:
            x = torch.cat([self._entering(x[rows[place]], quant.w1, expert) for expert, place in groups])
            spread = torch.arange(len(rows), device=rows.device)
        else:
            spread = rows
        if scale is not None and key is not None:
            x = dequantize_tensor(Quantized(x, scale, None), key)
        elif before:
            x = self.quantized(x, quant.a1)

        def hidden(expert: int, place: slice) -> Tensor:
            own = x[spread[place]]
            if not before:
                own = self._quantized_rows(self._entering(own, quant.w1, expert), quant.a1, expert)
            added = None if adapters is None else adapters.product("w13", expert, plain[rows[place]], place)
            return self.first(own, weights, expert, added)

        def result(expert: int, place: slice, h: Tensor, quantized: Tensor) -> Tensor:
            y = self.second(quantized, weights, expert)
            return y if adapters is None else y + adapters.product("w2", expert, h, place)

        if not together:
            for expert, place in groups:
                h = hidden(expert, place)
                entering = self._quantized_rows(self._entering(h, quant.w2, expert), quant.a2, expert)
                yield place, result(expert, place, h, entering)
        elif groups:
            activated = [hidden(*group) for group in groups]
            entering = torch.cat([self._entering(h, quant.w2, e) for h, (e, _) in zip(activated, groups, strict=True)])
            quantized = self.quantized(entering, quant.a2)
            for h, (expert, place) in zip(activated, groups, strict=True):
                yield place, result(expert, place, h, quantized[place])

    @staticmethod
    def _entering(x: Tensor, desc: FusedMoEQuantDesc, expert: int) -> Tensor:
        """One expert's rows ``x`` [R, cols], multiplied by its input factors, if any."""
        return x if desc.pre_scale is None else x * desc.pre_scale[expert]

    def _quantized_rows(self, x: Tensor, desc: FusedMoEQuantDesc, expert: int) -> Tensor:
        """Quantize one expert's activations with static, per-token or per-group scales."""
        if desc.key is None or not desc.key.is_static:
            return self.quantized(x, desc)
        own = of_expert(desc, expert)
        return self.quantized(x, own, own.scale)


@dataclass(frozen=True, eq=False)
class Adapters:
    """LoRA weights, and the adapter of each pair.

    Attributes:
        weights: The adapters.
        ids: [P], sorted by expert.
    """

    weights: LoRAWeights
    ids: Tensor

    def product(self, name: str, expert: int, x: Tensor, place: slice) -> Tensor:
        """Compute what the adapters add to one expert's product.

        Args:
            name: "w13" or "w2".
            expert: Local expert.
            x: [R, cols] float32.
            place: Position of the rows among all pairs.

        Returns:
            [R, rows] float32.
        """
        a: Tensor = getattr(self.weights, f"{name}_a")
        b: Tensor = getattr(self.weights, f"{name}_b")
        wanted = self.ids[place]
        added = x.new_zeros(len(x), b.shape[2])
        for adapter in set(wanted.tolist()) & set(range(self.weights.num_adapters)):
            rows = wanted == adapter
            added[rows] = lora_product(x[rows], a[adapter, expert].float(), b[adapter, expert].float())
        return added


def _dequantized(
    weights: Tensor, desc: FusedMoEQuantDesc, expert: int, parts: int, cols: int, dtype: torch.dtype
) -> Tensor:
    """One expert's matrix [rows, cols] in ``dtype``, float32 or float64."""
    if desc.key is None or desc.scale is None:
        raise TensorError(f"the scale of weights quantized as {desc.key} is missing")
    own = {name: tensor[expert : expert + 1] for name, tensor in desc.tensors()}
    return dequantize_weight(
        weights[expert : expert + 1],
        own["scale"],
        desc.key,
        parts=parts,
        zero_point=own.get("zero_point"),
        g_idx=own.get("g_idx"),
        scale2=own.get("scale2"),
        cols=cols,
        dtype=dtype,
    )[0]


def _beyond_float32(matrix: Tensor, desc: FusedMoEQuantDesc, expert: int) -> bool:
    """Whether float codes of one expert times their scales overflow its float32 ``matrix``."""
    key, scale, scale2 = desc.key, desc.scale, desc.scale2
    if key is None or scale is None or key.dtype.kind is not NumberKind.FLOAT or not matrix.numel():
        return False
    # Check the scales first: there are few, and they are almost never that large.
    largest = scale_values(scale[expert]).amax() * key.dtype.max_value
    if scale2 is not None:
        largest = largest * scale_values(scale2[expert]).amax()
    return not bool(largest.isfinite()) and bool(matrix.isinf().any())


def expert_slices(counts: Sequence[int]) -> list[tuple[int, slice]]:
    """List the experts that have pairs, with the position of their pairs.

    Args:
        counts: Number of pairs per expert; pairs are sorted by expert.

    Returns:
        (expert, slice) for each.
    """
    found, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append((expert, slice(start, start + count)))
            start += count
    return found


def of_expert(desc: FusedMoEQuantDesc, expert: int) -> FusedMoEQuantDesc:
    """Select the static activation scales and zero point of one expert.

    Args:
        desc: Quantization of the activations of all experts, with scales [E].
        expert: Local expert.

    Returns:
        The description with scalar scales and zero point.
    """
    own: dict[str, Any] = {name: tensor[expert] for name, tensor in desc.tensors()}
    return replace(desc, **own)
