"""Weights, hidden states and routing for conformance cases, made to expose every mix-up.

- Every expert, scale group, token and group of columns has a distinct magnitude. No weight or bias repeats.
- Values reach the activation's limit.
- Some groups of 4- and 8-bit floats hold only subnormal codes, with a scale that compensates.
- Some e8m0 scales are the smallest and largest representable ones.
- Integers reach their lowest code, -128 or -8.
- Zero points vary widely. Some are one more than the largest code, as some tools store them.
- Groups of permuted columns have arbitrary sizes. Those of w2 are the groups of a row that two ranks share.

Everything is drawn on the CPU, so a seed gives the same tensors on every device.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from moe_core.reference.fused_moe import Steps, route_pairs
from moe_core.reference.quantization import Grid, quantize_moe_weights, quantize_weight, static_scales
from moe_core.reference.skewed_routing import skewed
from moe_core.spec.activation import MoEActivation
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.lora import LoRAWeights, lora_shapes
from moe_core.spec.numerics import NumberKind, is_e8m0
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import MoEWeights

#: how tokens are spread: over all experts; over some experts, with the others idle; all on the same experts; with some
#: ids that select no expert (out of range, or mapped to an invalid local id); with such ids only
ROUTINGS = ("uniform", "idle", "one", "invalid", "nothing")
#: routing of random cases only: popular experts get most tokens, the r-th one in proportion to 1 / r (Zipf's law)
SKEWED = "skewed"


@dataclass(frozen=True, eq=False)
class Inputs:
    """Arguments of one call.

    Attributes:
        x: Hidden states ``[M, K]``.
        topk_weights: Router weights ``[M, k]``.
        topk_ids: Expert ids ``[M, k]``.
        expert_map: Local expert id of each global expert ``[E]``, or None.
        adapter_ids: LoRA adapter of each token ``[M]``, or None.
    """

    x: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    expert_map: Tensor | None = None
    adapter_ids: Tensor | None = None

    def to(self, device: torch.device | str) -> Inputs:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: t.to(device) for name, t in moved.items() if t is not None})

    def strided(self) -> Inputs:
        """Return the same values in padded rows; columns stay dense.

        The padding holds NaN in floats, huge expert ids, and 0, a valid local id, in maps and adapter ids.
        """
        return replace(
            self,
            x=_apart(self.x, math.nan),
            topk_weights=_apart(self.topk_weights, math.nan),
            topk_ids=_apart(self.topk_ids, 2**31 - 1),
            expert_map=None if self.expert_map is None else _apart(self.expert_map[:, None], 0)[:, 0],
            adapter_ids=None if self.adapter_ids is None else _apart(self.adapter_ids[:, None], 0)[:, 0],
        )


def _apart(tensor: Tensor, filling: float) -> Tensor:
    rows, columns = tensor.shape
    wide = torch.full((rows, columns + 3), filling, dtype=tensor.dtype, device=tensor.device)
    wide[:, :columns] = tensor
    return wide[:, :columns]


def make_inputs(
    config: FusedMoEConfig,
    tokens: int,
    *,
    seed: int,
    routing: str = "uniform",
    ids_dtype: torch.dtype = torch.int32,
) -> Inputs:
    """Return random hidden states and routing for a layer.

    Args:
        config: The layer.
        tokens: Number of tokens.
        seed: Seed of the random generator.
        routing: One of :data:`ROUTINGS`, or :data:`SKEWED`.
        ids_dtype: Dtype of the expert ids.

    Returns:
        The call's arguments, on the CPU, with an expert map if the layer holds a subset of the experts.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = -(-config.hidden_size // 32)
    x = torch.randn(tokens, config.hidden_size, generator=generator)
    # Tokens differ less than weights: the product of gate and up squares the magnitude, and one token would dominate.
    x = x * _magnitudes((tokens, 1), generator).sqrt()
    x = x * _magnitudes((tokens, columns), generator).sqrt().repeat_interleave(32, dim=1)[:, : config.hidden_size]
    x = x / x.square().mean().sqrt().clamp_min(1e-6) if tokens else x
    weights = torch.rand(tokens, config.top_k, generator=generator) + 0.1
    ids = _ids(config, tokens, routing, ids_dtype, generator)
    expert_map = None
    if config.local_experts < config.num_experts:
        # Local experts have arbitrary order and arbitrary global positions.
        places = torch.randperm(config.num_experts, generator=generator)[: config.local_experts]
        expert_map = torch.full((config.num_experts,), -1, dtype=torch.int32)
        expert_map[places] = torch.arange(config.local_experts, dtype=torch.int32)
    if routing in ("invalid", "nothing"):
        _mislead(ids, expert_map, config, routing, ids_dtype)
    adapter_ids = None
    if config.is_lora_enabled:
        # Invalid adapter ids, which mean no adapter.
        wrong = torch.tensor([-1, config.max_loras, -7, 2**31 - 1], dtype=torch.int32)
        adapter_ids = torch.randint(config.max_loras, (tokens,), dtype=torch.int32, generator=generator)
        without = torch.rand(tokens, generator=generator) < 1 / 4
        adapter_ids[without] = wrong[torch.arange(tokens) % 4][without]
    return Inputs(x.to(config.dtype), weights, ids.to(ids_dtype), expert_map, adapter_ids)


def _mislead(
    ids: Tensor, expert_map: Tensor | None, config: FusedMoEConfig, routing: str, ids_dtype: torch.dtype
) -> None:
    """Write misleading ids in place: they select no expert, but careless code reads a wrong one.

    Careless code would select an expert on this rank or read memory behind the weights. 64-bit ids become local experts
    when their upper half is lost. Maps give remote experts invalid local ids other than -1. Both go to tokens without
    any expert, where every contribution is visible.
    """
    held, wide, elsewhere = min(1, config.num_experts - 1), [], []
    if expert_map is not None:
        local = config.local_experts
        held = int((expert_map == 0).nonzero()[0])
        elsewhere = (expert_map < 0).nonzero().flatten().tolist()
        invalid = (local, -7, local + 90) if routing == "invalid" else (-7, local + 90, local)
        for expert, local_id in zip(elsewhere, itertools.cycle(invalid), strict=False):
            expert_map[expert] = local_id
    if ids_dtype is torch.int64:
        wide = [2**32 + held, held - 2**33]
    misleading = [i for pair in itertools.zip_longest(wide, elsewhere) for i in pair if i is not None]
    tokens = range(len(ids)) if routing == "nothing" else range(1, len(ids), 3)
    for place, number in zip(itertools.product(tokens, range(config.top_k)), misleading, strict=False):
        ids[place] = number


def _ids(
    config: FusedMoEConfig, tokens: int, routing: str, ids_dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    experts, top_k = config.num_experts, config.top_k
    choice = torch.rand(tokens, experts, generator=generator)
    if routing == "idle":
        choice[:, max(top_k, experts // 2) :] = -1.0
    if routing == SKEWED:
        choice = skewed(choice, 1.0)
    if routing == "one" and tokens:
        choice = choice[:1].expand(tokens, experts)
    ids = choice.topk(top_k, dim=1).indices.clone()
    if routing in ("invalid", "nothing"):
        wide = [2**32 + 1, -(2**33)] * (ids_dtype is torch.int64)
        wrong = torch.tensor([-1, experts, -(2**31), 2**31 - 1, experts + 1, -2, *wide])
        pick = wrong[torch.randint(len(wrong), ids.shape, generator=generator)]
        replaced = torch.rand(ids.shape, generator=generator) < (0.4 if routing == "invalid" else 2.0)
        if routing == "invalid":
            replaced[1::3] = True  # tokens without any expert, between tokens with some
            replaced[2:3] = False
            pick[:1, 0], replaced[:1, 0] = -1, True
        ids = torch.where(replaced, pick, ids)
    return ids


def make_weights(
    config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None, *, seed: int
) -> MoEWeights:
    """Return random canonical weights for a layer and its keys.

    Args:
        config: The layer.
        weight_key: Weight format, or None for 16-bit weights.
        activation_key: Activation format; a static one adds input scales.
        seed: Seed of the random generator.

    Returns:
        The weights, with biases, input scales, column groups and pre-scales if the layer or its keys have them.
    """
    generator = torch.Generator().manual_seed(seed)
    experts, hidden, inter = config.local_experts, config.hidden_size, config.intermediate_size
    w13 = _matrices(experts, config.w13_rows, hidden, 2 if config.is_gated else 1, weight_key, generator)
    w2 = _matrices(experts, hidden, inter, 1, weight_key, generator)
    w13 *= _first_product_size(config) / math.sqrt(hidden)
    w2 *= 1 / math.sqrt(inter)
    biases: dict[str, Any] = {}
    if config.has_bias:
        biases["w13_bias"] = (0.5 * torch.randn(experts, config.w13_rows, generator=generator)).to(config.dtype)
        biases["w2_bias"] = (0.5 * torch.randn(experts, hidden, generator=generator)).to(config.dtype)
    groups: dict[str, Any] = {}
    if weight_key is not None and weight_key.permuted:
        for name, w in (("w13", w13), ("w2", w2)):
            count = weight_key.group_shape.grid(1, w.shape[2])[1]
            count = 2 * count if name == "w2" and weight_key.group_size > 0 else count
            g_idx = _column_groups(experts, w.shape[2], count, generator)
            w *= _magnitudes((experts, count), generator).gather(1, g_idx.long())[:, None, :]
            groups |= {f"{name}_g_idx": g_idx, f"{name}_groups": count}
    if weight_key is not None and weight_key.pre_scaled:
        for name, w in (("w13", w13), ("w2", w2)):
            factors = _magnitudes((experts, w.shape[2]), generator).sqrt()
            w /= factors[:, None, :]
            groups[f"{name}_pre_scale"] = factors
    if weight_key is None:
        w13, w2 = w13.to(config.dtype), w2.to(config.dtype)
    weights = quantize_moe_weights(
        w13,
        w2,
        gated=config.is_gated,
        weight_key=weight_key,
        activation_key=activation_key,
        **biases,
        **groups,
    )
    if weight_key is not None and weight_key.dtype.kind is NumberKind.FLOAT:
        weights = _with_edges(weights, (w13, w2), config, weight_key, generator)
    if weight_key is not None and weight_key.dtype.kind is NumberKind.UINT:
        weights = _with_all_codes(weights, (w13, w2), config, weight_key, generator)
    if weight_key is not None and weight_key.dtype.kind is NumberKind.INT and weight_key.packing is None:
        for codes, scale in ((weights.w13, weights.w13_scale), (weights.w2, weights.w2_scale)):
            # The lowest code, and scales of either sign: the quantizers of this project do not produce them, but other
            # tools do.
            codes[codes == -weight_key.dtype.max_value] = int(weight_key.dtype.min_value)
            if scale is not None:
                scale *= torch.where(torch.rand(scale.shape, generator=generator) < 1 / 6, -1, 1).to(scale.dtype)
    if activation_key is not None and activation_key.is_static:
        weights = _calibrated(weights, config, activation_key, seed)
    return weights


def _with_edges(
    weights: MoEWeights,
    values: tuple[Tensor, Tensor],
    config: FusedMoEConfig,
    key: QuantKey,
    generator: torch.Generator,
) -> MoEWeights:
    """Requantize ``values`` with a sixth of the groups subnormal and a few extreme e8m0 scales."""
    changed: dict[str, Any] = {}
    # Power of two that raises scales so that all codes become subnormal: the largest value is below the smallest normal
    # number times that power.
    smallest_normal = key.dtype.magnitudes[2**key.dtype.mantissa_bits]
    shift = math.frexp(key.dtype.max_value / smallest_normal)[1]
    for name, w, parts in (("w13", values[0], 2 if config.is_gated else 1), ("w2", values[1], 1)):
        scale: Tensor = getattr(weights, f"{name}_scale").clone()
        chosen = torch.rand(scale.shape, generator=generator) < 1 / 6
        if is_e8m0(key.scale.dtype):
            scale.view(torch.uint8).add_(shift * chosen.to(torch.uint8))
        else:
            raised = scale.float() * 2.0**shift
            chosen &= raised <= torch.finfo(scale.dtype).max
            scale = torch.where(chosen, raised, scale.float()).to(scale.dtype)
        scale2 = getattr(weights, f"{name}_scale2")
        codes, scale, *_ = quantize_weight(w, key, parts=parts, scale=scale, scale2=scale2)
        if is_e8m0(key.scale.dtype) and scale[0].numel() >= 16:
            codes, scale = _extreme(codes, scale, w, key, parts)
        changed |= {name: codes, f"{name}_scale": scale}
    return replace(weights, **changed)


def _with_all_codes(
    weights: MoEWeights,
    values: tuple[Tensor, Tensor],
    config: FusedMoEConfig,
    key: QuantKey,
    generator: torch.Generator,
) -> MoEWeights:
    """Requantize ``values`` to reach the lowest code or widely varying zero points."""
    changed: dict[str, Any] = {}
    for name, w, parts in (("w13", values[0], 2 if config.is_gated else 1), ("w2", values[1], 1)):
        scale: Tensor = getattr(weights, f"{name}_scale")
        zero_point: Tensor | None = getattr(weights, f"{name}_zero_point")
        chance = torch.rand(scale.shape, generator=generator)
        if zero_point is None:
            # Symmetric quantizers do not produce the lowest code: -8 if their largest is 7.
            smaller = scale.float() * (key.dtype.max_value / (key.dtype.max_value + 1))
            smaller = torch.where(chance < 1 / 3, smaller, scale.float())
            # They do not produce negative scales either, which other tools write.
            scale = torch.where(chance < 1 / 6, -smaller, smaller).to(scale.dtype)
        else:
            largest = int(key.dtype.max_value)
            moved = (largest * torch.rand(scale.shape, generator=generator)).to(torch.int32)
            zero_point = torch.where(chance < 1 / 2, moved, zero_point)
            zero_point = torch.where(chance > 0.9, largest + 1, zero_point)
            if name == "w2":
                zero_point = zero_point.clamp(max=255).to(torch.uint8)
            changed[f"{name}_zero_point"] = zero_point
        g_idx: Tensor | None = getattr(weights, f"{name}_g_idx")
        scale2: Tensor | None = getattr(weights, f"{name}_scale2")
        found = quantize_weight(w, key, parts=parts, g_idx=g_idx, scale=scale, zero_point=zero_point, scale2=scale2)
        changed |= {name: found.values, f"{name}_scale": scale}
    return replace(weights, **changed)


def _extreme(codes: Tensor, scale: Tensor, w: Tensor, key: QuantKey, parts: int) -> tuple[Tensor, Tensor]:
    """Add a group of zeros with the largest e8m0 scale, 2**127, and one with the least, 2**-127.

    Each expert has one of both. Neither contributes to the result, unless the scale becomes infinite or NaN on the way.
    """
    bare = torch.zeros(scale.shape, dtype=torch.bool)
    smallest = torch.zeros_like(bare)
    bare[:, scale.shape[1] // 2, 0] = True
    smallest[:, scale.shape[1] // 3, scale.shape[2] // 2] = True
    exponents = scale.view(torch.uint8)
    zero = Grid.of(key.scale, w.shape[0], w.shape[1], w.shape[2], parts).spread(bare)
    if key.packing is not None:
        zero = zero[:, :, :: key.packing.values_per_word]
    raw = torch.where(zero, 0, codes.view(torch.uint8)).view(codes.dtype)
    exponents = torch.where(bare, 254, torch.where(smallest, 0, exponents)).to(torch.uint8)
    return raw, exponents.view(scale.dtype)


def has_extreme_scales(weights: MoEWeights) -> bool:
    """Whether :func:`without_extreme_scales` changes anything.

    Args:
        weights: Canonical weights.

    Returns:
        True if the weights have e8m0 scales.
    """
    return weights.weight_key is not None and is_e8m0(weights.weight_key.scale.dtype)


def without_extreme_scales(weights: MoEWeights) -> MoEWeights:
    """Return the same values, with ordinary e8m0 scales in place of 2**-127 and 2**127.

    Args:
        weights: Canonical weights; the groups with these scales hold zeros.

    Returns:
        The weights with the median exponent in place of the extreme ones.
    """
    changed: dict[str, Any] = {}
    for name in ("w13_scale", "w2_scale"):
        scale: Tensor | None = getattr(weights, name)
        if scale is not None and has_extreme_scales(weights):
            exponents = scale.view(torch.uint8)
            usual = exponents.median()
            kept = torch.where((exponents == 254) | (exponents == 0), usual, exponents)
            changed[name] = kept.view(scale.dtype)
    return replace(weights, **changed)


def _first_product_size(config: FusedMoEConfig) -> float:
    """Root mean square of the first product, large enough that many values reach a limit."""
    limit = config.params.limit
    if config.activation in (MoEActivation.RELU2, MoEActivation.RELU2_NO_MUL):
        return 1.0 if limit is None else min(max(1.0, 0.6 * limit), 4.0)
    return 1.5 if limit is None else min(max(1.5, 0.6 * limit), 6.0)


def _magnitudes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Factors within 2**±2, one per element of ``shape``."""
    return torch.exp2(4 * torch.rand(shape, generator=generator) - 2)


def make_lora(config: FusedMoEConfig, *, seed: int) -> LoRAWeights:
    """Return random adapters whose contribution is about as large as the base product.

    Args:
        config: The layer, with LoRA enabled.
        seed: Seed of the random generator.

    Returns:
        The adapters, in the layer's dtype.
    """
    generator = torch.Generator().manual_seed(seed + 2)
    shapes = lora_shapes(config)
    sizes = {"w13_b": _first_product_size(config)}

    def matrices(name: str) -> Tensor:
        adapters, experts, rows, columns = shape = shapes[name]
        values = torch.randn(shape, generator=generator) * sizes.get(name, 1.0) / math.sqrt(columns)
        return (values * _magnitudes((adapters, experts, 1, 1), generator).sqrt()).to(config.dtype)

    return LoRAWeights(**{name: matrices(name) for name in shapes})


def _matrices(
    experts: int, rows: int, cols: int, parts: int, key: QuantKey | None, generator: torch.Generator
) -> Tensor:
    """Random ``[experts, rows, cols]`` of mean square 1.

    The magnitude differs by expert, part and scale group.
    """
    part_rows = rows // parts
    shape = (16, 16) if key is None else (key.group_shape.row, key.group_shape.col)
    row, col = (size if size > 0 else full for size, full in zip(shape, (part_rows, cols), strict=True))
    grid = (experts, parts, -(-part_rows // row), -(-cols // col))
    factors = _magnitudes(grid, generator) * _magnitudes((experts, 1, 1, 1), generator).sqrt()
    factors = factors.repeat_interleave(row, dim=2)[:, :, :part_rows]
    factors = factors.repeat_interleave(col, dim=3)[:, :, :, :cols]
    w = torch.randn(experts, rows, cols, generator=generator) * factors.reshape(experts, rows, cols)
    return w / w.square().mean().sqrt()


def _column_groups(experts: int, cols: int, groups: int, generator: torch.Generator) -> Tensor:
    """Group of every column, ``[experts, cols]`` int32; order and sizes differ between experts."""
    sizes = torch.rand(experts, groups, generator=generator) + 0.2
    return torch.multinomial(sizes, cols, replacement=True, generator=generator).to(torch.int32)


def _calibrated(weights: MoEWeights, config: FusedMoEConfig, key: QuantKey, seed: int) -> MoEWeights:
    """Add static input scales, calibrated on random tokens; they differ between experts."""
    inputs = make_inputs(replace(config, num_local_experts=None), 64, seed=seed + 1)
    steps = Steps(replace(weights, activation_key=None), config, torch.float64, None, None)
    hidden = []
    # Every expert sees every token, so every expert has a scale.
    everywhere = replace(config, top_k=config.num_experts, apply_router_weight_on_input=False)
    ids = torch.arange(config.num_experts).expand(len(inputs.x), -1)
    identity = torch.full((config.num_experts,), -1, dtype=torch.int32)
    identity[: config.local_experts] = torch.arange(config.local_experts, dtype=torch.int32)
    routed = route_pairs(everywhere, ids, identity)
    x, row = steps.pre_scaled("w13", inputs.x.double(), routed.token, routed)
    entering = []
    for expert, pairs in routed.by_expert:
        own = x[row[pairs]]
        h = steps.first_product(expert, own)
        if weights.w2_pre_scale is not None:
            h = h * weights.w2_pre_scale[expert].double()
        entering.append(torch.stack((own.min(), own.max())))
        hidden.append(torch.stack((h.min(), h.max())))
    # Here every expert sees the same tokens. In a model they see different tokens, so the scales must differ.
    spread = _magnitudes((config.local_experts,), torch.Generator().manual_seed(seed + 2)).sqrt()
    static: dict[str, Any] = {}
    for name, ranges in (("w13", torch.stack(entering) * spread[:, None].double()), ("w2", torch.stack(hidden))):
        # Slightly narrower than the observed range, so that a few values saturate.
        low, high = (0.9 * ranges).unbind(1)
        # Make the range asymmetric for any sample, so that zero points matter.
        low = low if key.symmetric else 0.75 * low
        static |= {f"{name}_input_{role}": tensor for role, tensor in static_scales(low, high, key).items()}
    return replace(weights, **static)
