"""Reference fused MoE layer in plain torch, which defines the result of every backend.

    z_s   = xq W13[e_s]^T + b13[e_s]                    per token and slot s, e_s = expert_map[topk_ids[s]]
    h_s   = activation(z_s)
    y_s   = hq_s W2[e_s]^T + b2[e_s]
    out   = sum_s topk_weights[s] y_s                    (apply_router_weight_on_input: x is weighted instead)

LoRA adapters (:mod:`moe_core.spec.lora`) add to z_s and y_s. With pre-scaled weights, x and h are multiplied by the
expert's column factors and then quantized; adapters see x and h without the factors.

``xq`` and ``hq`` are the activations, quantized by the activation key and dequantized
(:mod:`moe_core.reference.quantization`). The quantizer works on float32 values, everything else in float64. Static
scales are separate per expert. A dynamic per-tensor scale covers the values that this rank computes. For ``x`` these
are the tokens with at least one slot on this rank (pre-scaled: those slots), for ``h`` all slots on this rank. In the
batched format both cover all rows in use. A slot contributes nothing if its id is negative, at least E, or mapped to
an index that is not a local expert (-1 by convention).

``compute_dtype`` selects the precision of a straightforward implementation. Weights and quantized activations are
dequantized to that dtype, products are summed in float32, and every intermediate is rounded to the dtype. The error
of that result is the yardstick for a backend's error.
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
    """Compute the weighted sum of the routed experts.

    Runs on any device, expert by expert, and needs the memory of two dequantized experts.

    Args:
        x: [M, K].
        weights: Canonical weights of the local experts.
        config: Configuration of the layer.
        topk_weights: [M, k] float.
        topk_ids: [M, k] int32 or int64, global expert ids.
        expert_map: [E], as for :meth:`moe_core.runtime.kernel.FusedMoEKernel.apply`.
        quantize_activations: False: compute as if the activation key were None.
        dtype: float64 or float32, the precision if ``compute_dtype`` is None, and the dtype of the result.
        compute_dtype: bfloat16, float16 or float32: compute the yardstick described in the module docstring.
        lora: Adapters, and the adapter id of each token.

    Returns:
        [M, K] in ``dtype``.

    Raises:
        TensorError: Tensors do not fit together.
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
        raise TensorError(f"dtype of the reference must be float64 or float32, got {dtype}")
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
    """The (token, slot) pairs whose expert is on this rank.

    Attributes:
        token: [P], the token of each pair.
        slot: [P], the slot of each pair.
        by_expert: Local expert and the positions of its pairs.
    """

    token: Tensor
    slot: Tensor
    by_expert: list[tuple[int, Tensor]]

    def only_used(self, x: Tensor) -> Tensor:
        """Zero the tokens without a pair, which must not affect dynamic scales.

        Args:
            x: [M, K].

        Returns:
            [M, K].
        """
        used = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
        used[self.token] = True
        return torch.where(used[:, None], x, 0.0)


def route_pairs(config: FusedMoEConfig, topk_ids: Tensor, expert_map: Tensor | None) -> RoutedPairs:
    """Collect the pairs with an expert on this rank.

    Args:
        config: Configuration of the layer.
        topk_ids: [M, k]; ids out of range are skipped.
        expert_map: [E]; ids mapped to other ranks are skipped.

    Returns:
        The pairs.

    Raises:
        TensorError: The map is required and missing.
    """
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
    """The computation steps of one layer.

    Args:
        weights: Canonical weights.
        config: Configuration of the layer.
        wide: Dtype that holds intermediate values.
        compute_dtype: Dtype that intermediates are rounded to; None: only the quantizer rounds.
        activation_key: Quantization key of the activations, or None.
    """

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
        """Round to ``compute_dtype``, if there is one.

        Args:
            x: Values in the intermediate dtype.

        Returns:
            The rounded values in the intermediate dtype.
        """
        return x if self.compute_dtype is None else x.to(self.compute_dtype).to(self.wide)

    def weighted_input(self, x: Tensor, topk_weights: Tensor, routed: RoutedPairs) -> Tensor:
        """Compute the input of the first product, weighted if the router weight is on the input.

        Args:
            x: [M, K].
            topk_weights: [M, k].
            routed: Pairs on this rank.

        Returns:
            [M, K].
        """
        inputs = routed.only_used(x.to(self.wide))
        if self.config.apply_router_weight_on_input:
            inputs = self.round(inputs * topk_weights.to(self.wide))
        return inputs

    def pre_scaled(self, name: str, x: Tensor, row: Tensor, routed: RoutedPairs) -> tuple[Tensor, Tensor]:
        """Apply the column factors of pre-scaled weights.

        Args:
            name: "w13" or "w2".
            x: Rows that enter the product.
            row: [P], the row of ``x`` of each pair.
            routed: Pairs on this rank.

        Returns:
            The rows that enter the product, and [P], the row of each pair. Without factors these are ``x`` and
            ``row``; with factors, which differ between experts, each pair has a separate row.
        """
        factors: Tensor | None = getattr(self.weights, f"{name}_pre_scale")
        if factors is None:
            return x, row
        spread = x[row]
        for expert, pairs in routed.by_expert:
            spread[pairs] = self.round(spread[pairs] * factors[expert].to(self.wide))
        return spread, torch.arange(len(spread), device=x.device)

    def quantized(self, x: Tensor) -> Tensor:
        """Quantize all rows of x or h, if scales are dynamic.

        All rows are needed because one scale may cover them all.

        Args:
            x: Rows of x or h.

        Returns:
            The quantized and dequantized rows.
        """
        key = self.activation_key
        return x if key is None or key.is_static else self.round(fake_quantize(x, key))

    def first_product(self, expert: int, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Compute the activated result of the first product of one expert.

        Args:
            expert: Local expert.
            x: [m, K].
            added: [m, 2N] from adapters, or None.

        Returns:
            [m, N].
        """
        z = self._linear("w13", expert, x)
        z = self.round(z if added is None else z + added)
        return self.round(apply_moe_activation(self.config.activation, z, self.config.activation_params))

    def addition(self, lora: LoRA | None, name: str, expert: int, x: Tensor, token: Tensor) -> Tensor | None:
        """Compute what the adapters add to one product.

        Args:
            lora: The adapters, or None.
            name: "w13" or "w2".
            expert: Local expert.
            x: [m, cols].
            token: [m], the token of each row.

        Returns:
            [m, rows], or None without adapters.
        """
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
        """Compute the unweighted result of the second product of one expert.

        Args:
            expert: Local expert.
            hidden: [m, N].

        Returns:
            [m, K].
        """
        return self._linear("w2", expert, hidden)

    def weight(self, name: str, expert: int) -> Tensor:
        """Dequantize one expert's matrix.

        Args:
            name: "w13" or "w2".
            expert: Local expert.

        Returns:
            [rows, cols].
        """
        own = {role: tensor[expert : expert + 1] for role, tensor in self.weights.of(name).items()}
        key = self.weights.weight_key
        if key is None:
            return self.round(own[""][0].to(self.wide))
        values = dequantize_weight(
            own[""],
            own["scale"],
            key,
            parts=2 if name == "w13" and self.config.is_gated else 1,
            zero_point=own.get("zero_point"),
            g_idx=own.get("g_idx"),
            scale2=own.get("scale2"),
            cols=self.config.hidden_size if name == "w13" else self.config.intermediate_size,
            dtype=self.wide,
        )
        return self.round(values[0])

    def input_tensors(self, name: str, expert: int) -> dict[str, Tensor]:
        """Return the static scales and zero point of one expert's activations.

        Args:
            name: "w13" or "w2".
            expert: Local expert.

        Returns:
            Scalars, by the argument names of :func:`moe_core.reference.quantization.fake_quantize`.
        """
        tensors = self.weights.of(name).items()
        return {role.removeprefix("input_"): one[expert] for role, one in tensors if role.startswith("input_")}

    def _linear(self, name: str, expert: int, x: Tensor) -> Tensor:
        key = self.activation_key
        if key is not None and key.is_static:
            x = self.round(fake_quantize(x, key, **self.input_tensors(name, expert)))
        result = x @ self.weight(name, expert).T
        bias: Tensor | None = getattr(self.weights, f"{name}_bias")
        return result if bias is None else result + bias[expert].to(self.wide)
