"""What a fused MoE layer computes, in plain torch: the definition that every backend is measured against.

    z_s   = xq W13[e_s]^T + b13[e_s]                    per token and slot s, e_s = expert_map[topk_ids[s]]
    h_s   = activation(z_s)
    y_s   = hq_s W2[e_s]^T + b2[e_s]
    out   = sum_s topk_weights[s] y_s                    (apply_router_weight_on_input: x is weighted instead)

LoRA adapters (:mod:`moe_core.spec.lora`) add to z_s and y_s.  Where the weights are pre-scaled, x and h are first
multiplied by the expert's factors of their columns, then quantised; adapters see them as they are.

``xq`` and ``hq`` are the activations after quantisation by the activation key and back
(:mod:`moe_core.reference.quantization`): the quantiser works on float32 values, everything around it in float64.  A
static scale is each expert's own.  A dynamic scale per tensor spans what this rank computes: for ``x`` the tokens with
at least one slot on this rank (pre-scaled: those slots), for ``h`` all slots on this rank (in the batched format both
span all rows in use).  A slot whose id is negative, at least E, or mapped to what is no local expert's number (-1 by
convention) contributes nothing.

With ``compute_dtype`` the same is computed the way a plain implementation would: weights and quantised activations
dequantised to that dtype, products summed in float32, every intermediate rounded to it.  That result's own error is the
yardstick for a backend's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core.errors import TensorError, check_dtype, check_instance, check_shape
from moe_core.reference.quantization import dequantize_weight, fake_quantize
from moe_core.spec.activation import apply_moe_activation
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.lora import LoRA, lora_product
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import MoEWeights


def fused_moe_reference(
    x: Tensor,
    weights: MoEWeights,
    config: FusedMoEConfig,
    *,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None = None,
    quantize_activations: bool = True,
    dtype: torch.dtype = torch.float64,
    compute_dtype: torch.dtype | None = None,
    lora: LoRA | None = None,
) -> Tensor:
    """The routed experts' weighted sum [M, K] of ``x`` [M, K], in ``dtype``.

    - ``topk_weights`` [M, k] float, ``topk_ids`` [M, k] int (global ids), ``expert_map`` [E] as for
      :meth:`moe_core.runtime.kernel.FusedMoEKernel.apply`
    - ``quantize_activations`` False: as if the activation key were None
    - ``dtype`` float64 or float32: of the computation, where ``compute_dtype`` is not given
    - ``lora``: adapters, and the number of each token's
    - ``compute_dtype`` bfloat16, float16 or float32: the yardstick of the module docstring, returned in ``dtype``

    Raises TensorError for tensors that don't fit each other.  Runs on any device, expert by expert: it needs the
    memory of two dequantised experts.
    """
    check_instance("weights", weights, MoEWeights)
    check_instance("config", config, FusedMoEConfig)
    check_instance("lora", lora, LoRA, type(None))
    check_instance("compute_dtype", compute_dtype, torch.dtype, type(None))
    check_shape("x", x, ("M", config.hidden_size))
    if x.device != weights.w13.device:
        raise TensorError(f"x is on {x.device}, w13 is on {weights.w13.device}")
    check_shape("topk_ids", topk_ids, (x.shape[0], config.top_k))
    check_shape("topk_weights", topk_weights, (x.shape[0], config.top_k))
    check_dtype("topk_ids", topk_ids, (torch.int32, torch.int64))
    if dtype not in (torch.float64, torch.float32):
        raise TensorError(f"the reference is computed in float64 or float32, got {dtype}")
    weights.validate(config)
    wide = dtype if compute_dtype is None else torch.float32
    steps = Steps(weights, config, wide, compute_dtype, weights.activation_key if quantize_activations else None)
    routed = route_pairs(config, topk_ids, expert_map)
    factor = topk_weights.to(wide)[routed.token, routed.slot, None]

    plain = steps.weighted_input(x, topk_weights, routed)
    inputs, row = steps.pre_scaled("w13", plain, routed.token, routed)
    inputs = steps.quantized(inputs)
    hidden = torch.zeros(len(routed.token), config.intermediate_size, dtype=wide, device=x.device)
    for expert, pairs in routed.by_expert:
        token = routed.token[pairs]
        added = steps.addition(lora, "w13", expert, plain[token], token)
        hidden[pairs] = steps.first_product(expert, inputs[row[pairs]], added)
    plain = hidden
    hidden, _ = steps.pre_scaled("w2", hidden, torch.arange(len(hidden), device=x.device), routed)
    hidden = steps.quantized(hidden)
    result = torch.zeros(len(routed.token), config.hidden_size, dtype=wide, device=x.device)
    for expert, pairs in routed.by_expert:
        result[pairs] = steps.second_product(expert, hidden[pairs])
        added = steps.addition(lora, "w2", expert, plain[pairs], routed.token[pairs])
        if added is not None:
            result[pairs] += added
    if not config.apply_router_weight_on_input:
        result = steps.round(result * factor)
    output = torch.zeros(x.shape[0], config.hidden_size, dtype=wide, device=x.device)
    output.index_add_(0, routed.token, result)
    return steps.round(output).to(dtype)


@dataclass(frozen=True, eq=False)
class RoutedPairs:
    """The (token, slot) pairs whose expert is on this rank: ``token`` [P], ``slot`` [P], positions by local expert."""

    token: Tensor
    slot: Tensor
    by_expert: list[tuple[int, Tensor]]

    def only_used(self, x: Tensor) -> Tensor:
        """``x`` [M, K] with zeros for the tokens without a pair, which no dynamic scale may depend on."""
        used = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
        used[self.token] = True
        return torch.where(used[:, None], x, 0.0)


def route_pairs(config: FusedMoEConfig, topk_ids: Tensor, expert_map: Tensor | None) -> RoutedPairs:
    """Pairs with an expert on this rank; what is out of range or mapped away is left out."""
    ids = topk_ids.long()
    valid = (ids >= 0) & (ids < config.num_experts)
    local = torch.where(valid, ids, torch.zeros_like(ids))
    if expert_map is not None:
        check_shape("expert_map", expert_map, (config.num_experts,))
        local = expert_map.long()[local]
        valid = valid & (local >= 0) & (local < config.local_experts)
    elif config.local_experts < config.num_experts:
        raise TensorError(
            f"expert_map [{config.num_experts}] is missing: there are {config.local_experts} local experts of "
            f"{config.num_experts}"
        )
    token, slot = valid.nonzero(as_tuple=True)
    chosen = local[token, slot]
    by_expert = [(e, (chosen == e).nonzero().flatten()) for e in sorted(set(chosen.tolist()))]
    return RoutedPairs(token, slot, by_expert)


class Steps:
    """The steps of one layer; ``compute_dtype`` None rounds nowhere but where the quantiser does."""

    def __init__(
        self,
        weights: MoEWeights,
        config: FusedMoEConfig,
        wide: torch.dtype,
        compute_dtype: torch.dtype | None,
        activation_key: QuantKey | None,
    ) -> None:
        self.weights = weights
        self.config = config
        self.wide = wide
        self.compute_dtype = compute_dtype
        self.activation_key = activation_key

    def round(self, x: Tensor) -> Tensor:
        return x if self.compute_dtype is None else x.to(self.compute_dtype).to(self.wide)

    def weighted_input(self, x: Tensor, topk_weights: Tensor, routed: RoutedPairs) -> Tensor:
        """[M, K]: x, weighted where the router weight is on the input."""
        inputs = routed.only_used(x.to(self.wide))
        if self.config.apply_router_weight_on_input:
            inputs = self.round(inputs * topk_weights.to(self.wide))
        return inputs

    def pre_scaled(self, name: str, x: Tensor, row: Tensor, routed: RoutedPairs) -> tuple[Tensor, Tensor]:
        """What enters the product with ``name``, and which row of it is each pair's: ``row`` [P] of ``x``, or its own
        where every expert multiplies its inputs by factors of its own.
        """
        factors: Tensor | None = getattr(self.weights, f"{name}_pre_scale")
        if factors is None:
            return x, row
        spread = x[row]
        for expert, pairs in routed.by_expert:
            spread[pairs] = self.round(spread[pairs] * factors[expert].to(self.wide))
        return spread, torch.arange(len(spread), device=x.device)

    def quantized(self, x: Tensor) -> Tensor:
        """All rows of x or h, quantised where their scales are dynamic: one may span them all."""
        key = self.activation_key
        return x if key is None or key.is_static else self.round(fake_quantize(x, key))

    def first_product(self, expert: int, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Activated result [m, N] of the expert's tokens ``x`` [m, K]; ``added`` [m, 2N] by adapters."""
        z = self._linear("w13", expert, x)
        z = self.round(z if added is None else z + added)
        return self.round(apply_moe_activation(self.config.activation, z, self.config.activation_params))

    def addition(self, lora: LoRA | None, name: str, expert: int, x: Tensor, token: Tensor) -> Tensor | None:
        """What adapters add to the product [m, rows] of ``x`` [m, cols], rows of the tokens ``token`` [m]."""
        if lora is None:
            return None
        a: Tensor = getattr(lora.weights, f"{name}_a")
        b: Tensor = getattr(lora.weights, f"{name}_b")
        wanted = lora.adapter_ids[token]
        added = x.new_zeros(len(x), b.shape[2])
        for adapter in range(lora.weights.num_adapters):
            rows = wanted == adapter
            if bool(rows.any()):
                low, high = (self.round(matrix[adapter, expert].to(self.wide)) for matrix in (a, b))
                added[rows] = lora_product(x[rows], low, high, self.round)
        return added

    def second_product(self, expert: int, hidden: Tensor) -> Tensor:
        """Unweighted result [m, K] of the expert's intermediate values ``hidden`` [m, N]."""
        return self._linear("w2", expert, hidden)

    def weight(self, name: str, expert: int) -> Tensor:
        """The expert's w13 or w2, dequantised, [rows, K]."""
        stored: Tensor = getattr(self.weights, name)[expert : expert + 1]
        key = self.weights.weight_key
        if key is None:
            return self.round(stored[0].to(self.wide))

        def part(suffix: str) -> Tensor | None:
            tensor: Tensor | None = getattr(self.weights, f"{name}_{suffix}")
            return None if tensor is None else tensor[expert : expert + 1]

        scale = part("scale")
        if scale is None:
            raise TensorError(f"{name}_scale is missing")
        first = name == "w13"
        values = dequantize_weight(
            stored,
            scale,
            key,
            parts=2 if first and self.config.is_gated else 1,
            zero_point=part("zero_point"),
            g_idx=part("g_idx"),
            cols=self.config.hidden_size if first else self.config.intermediate_size,
            dtype=self.wide,
        )
        return self.round(values[0])

    def _linear(self, name: str, expert: int, x: Tensor) -> Tensor:
        key = self.activation_key
        if key is not None and key.is_static:
            scales: Tensor | None = getattr(self.weights, f"{name}_input_scale")
            if scales is None:
                raise TensorError(f"{name}_input_scale is missing, the activation key is {key}")
            zero_points: Tensor | None = getattr(self.weights, f"{name}_input_zero_point")
            zero_point = None if zero_points is None else zero_points[expert]
            x = self.round(fake_quantize(x, key, scale=scales[expert], zero_point=zero_point))
        result = x @ self.weight(name, expert).T
        bias: Tensor | None = getattr(self.weights, f"{name}_bias")
        return result if bias is None else result + bias[expert].to(self.wide)
