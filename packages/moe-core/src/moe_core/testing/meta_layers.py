"""Layers of meta tensors: launches of everything that a backend claims, in layers of real and of odd sizes.

Weights, activations and workspaces are meta tensors, converted and called as in a user's layer. So a claimed key, dtype
or activation is compiled without further declarations. Every pair of keys occurs with every format and token count;
sizes, dtypes and features are drawn at random with a fixed seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_core.errors import ConfigError
from moe_core.interface.experts import ExpertTokensMetadata, FusedMoEExperts
from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.kernels.ops.quantize import quantize_activation
from moe_core.selection.memory import example_weights
from moe_core.selection.registry import registry
from moe_core.spec.activation import MoEActivation
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import Environment
from moe_core.spec.lora import LoRA, LoRAWeights
from moe_core.spec.quant_key import KeyPattern, QuantKey
from moe_core.spec.weights import KernelWeights
from moe_core.testing.launches import Example

#: experts, top-k, hidden size and intermediate size: DeepSeek-V3, Qwen3, Nemotron, odd sizes, and top-k 1
SIZES = ((16, 8, 7168, 2048), (16, 8, 2048, 768), (16, 6, 2688, 1856), (6, 2, 1104, 1000), (8, 1, 1024, 512))
#: token counts whose launch configurations are examined; one and two have dedicated kernels, with more variants
TOKENS = (1, 2, 8, 24, 40, 80, 160, 400, 1200, 5000, 1, 2)
#: fields of the layer's config that enable a feature, keyed by the feature's name
FEATURES: dict[str, dict[str, Any]] = {
    "silu": {},
    "relu2_no_mul": {"activation": MoEActivation.RELU2_NO_MUL},
    "bias": {"activation": MoEActivation.SWIGLUOAI, "has_bias": True, "num_local_experts": 3},
    "lora": {"is_lora_enabled": True, "max_loras": 4, "max_lora_rank": 16},
    "on_input": {"apply_router_weight_on_input": True},
    "gelu": {"activation": MoEActivation.GELU, "num_local_experts": 3},
    "invariant": {"batch_invariant": True},
    "codes": {},
    "shard": {},
}


def backend_examples(target: DeviceInfo, packages: Collection[str]) -> Iterator[Example]:
    """Yield launches of registered experts that claim a target.

    Args:
        target: The target to compile for.
        packages: Top-level packages whose experts are used.

    Yields:
        Examples of the experts classes that derive from :class:`GroupedExperts`.
    """
    backends = (backend for oracle in registry().oracles() for backend in oracle.table())
    for experts in dict.fromkeys(experts for backend in backends for experts in backend.load()):
        if issubclass(experts, GroupedExperts) and experts.__module__.partition(".")[0] in packages:
            yield from experts_examples(experts, target)


def key_pairs(experts: type[FusedMoEExperts]) -> Iterator[tuple[QuantKey | None, QuantKey | None]]:
    """Yield the claimed pairs of keys.

    Args:
        experts: Experts class.

    Yields:
        (weight key, activation key); patterns are replaced by :func:`some_keys`.
    """
    for weight, activation in experts.claims.keys:
        weights, activations = some_keys(weight), some_keys(activation)
        for i in range(max(len(weights), len(activations))):
            yield weights[i % len(weights)], activations[i % len(activations)]


def some_keys(item: QuantKey | KeyPattern | None) -> Sequence[QuantKey | None]:
    """Return a key itself, or keys of a pattern in which each of its values occurs.

    ``permuted`` occurs with and without ``pre_scaled``, since kernels get None for properties that a layer lacks.

    Args:
        item: Key, pattern or None.

    Returns:
        The keys.
    """
    if not isinstance(item, KeyPattern):
        return (item,)
    shapes, dtypes, permuted, pre_scaled = item.choices
    flags = tuple(itertools.product(permuted, pre_scaled))
    return [
        item.key(shapes[i % len(shapes)], dtypes[i % len(dtypes)], *flags[i % len(flags)])
        for i in range(max(len(shapes), len(dtypes), len(flags)))
    ]


def experts_examples(experts: type[GroupedExperts], target: DeviceInfo) -> Iterator[Example]:
    """Yield the launches of one experts class.

    Args:
        experts: Experts class.
        target: The target to compile for.

    Yields:
        The examples, one per distinct launch configuration of a pair of keys.
    """
    draw = random.Random(0)
    if all(each.reason_against(target) is not None for each in experts.claims.devices):
        return
    for keys in key_pairs(experts):
        for layout in sorted(experts.claims.formats, key=lambda item: item.value):
            layers = _layers(experts, *keys, layout, target)
            # Every feature occurs with each pair of keys; over all pairs, the random order reaches each token count.
            features = draw.sample(sorted(layers), len(layers))
            found: set[object] = set()
            for tokens, feature in zip(TOKENS, itertools.cycle(features), strict=False):
                made = draw.choice(layers[feature])
                shard, codes = feature == "shard", feature == "codes"
                # Rows of four-byte elements take more shared memory if they are quantized on load.
                plan = (made.plan(tokens), made.gemv_plan(tokens), made.config.dtype.itemsize, shard, codes)
                if plan not in found:
                    found.add(plan)
                    key, size = str(keys[0]).partition(" ")[0], made.config.hidden_size
                    text = f"{experts.__name__} {key} {size} {tokens} {feature}"
                    call = partial(call_on_meta, made, tokens, more_groups=shard, codes=codes)
                    yield Example(text, call, _accepted_spills(made))


def _layers(
    experts: type[GroupedExperts],
    weight_key: QuantKey | None,
    activation_key: QuantKey | None,
    layout: FusedMoEActivationFormat,
    target: DeviceInfo,
) -> dict[str, list[GroupedExperts]]:
    """Return the supported layers with each feature.

    The feature "shard" is a rank's shard that has more column groups than its size implies. Rows with an activation
    order are split between ranks, and their groups are padded to full size. So the GEMM addresses columns one by one,
    and sizes need not be multiples of anything.
    """
    environment = Environment.current()
    found: dict[str, list[GroupedExperts]] = {}
    for sizes, dtype, feature in itertools.product(SIZES, sorted(experts.claims.dtypes, key=str), FEATURES):
        count, top_k, hidden, size = sizes
        keys = [weight_key]
        if feature == "shard":
            if weight_key is None or not weight_key.permuted or weight_key.group_size == -1:
                continue
            hidden, size = hidden - 3, size + 3
            keys = [replace(weight_key, pre_scaled=pre_scaled) for pre_scaled in (False, True)]
        try:
            config = FusedMoEConfig(
                count, top_k, hidden, size, dtype=dtype, activation_format=layout, **FEATURES[feature]
            )
        except ConfigError:
            continue
        for key in keys:
            if not experts.unsupported_reasons(config, key, activation_key, target, environment):
                made = experts(config, weight_key=key, activation_key=activation_key, device=target)
                if feature != "codes" or made.takes_quantized:
                    found.setdefault(feature, []).append(made)
    return found


def _accepted_spills(experts: GroupedExperts) -> int:
    config = experts.config
    whole, others = experts.accepted_spills
    accepted = whole if config.hidden_size % 16 == config.intermediate_size % 16 == 0 else others
    return max(accepted, experts.accepted_lora_spills) if config.is_lora_enabled else accepted


def call_on_meta(experts: GroupedExperts, tokens: int, *, more_groups: bool = False, codes: bool = False) -> None:
    """Convert weights and call a layer once on meta tensors, with the launches of a GPU.

    `moe_core.kernels.launch.launch.record` collects the launches.

    Args:
        experts: Instance of an experts class.
        tokens: Number of tokens.
        more_groups: Whether rows have one more group of columns than their length implies.
        codes: Whether hidden states arrive quantized, as other ranks send them.
    """
    config = experts.config
    weights = meta_layer_weights(experts, more_groups=more_groups)
    workspace = {spec.name: _meta(*spec.shape, dtype=spec.dtype) for spec in experts.workspaces(tokens)}
    shape = (config.local_experts, tokens) if experts.batched else (tokens,)
    x = _meta(*shape, config.hidden_size, dtype=config.dtype)
    mapped = config.local_experts < config.num_experts and not experts.batched
    lora = None
    if config.is_lora_enabled:
        lora = LoRA(LoRAWeights.zeros(config, "meta"), _meta(*shape, dtype=torch.int32))
    output, scale = torch.empty_like(x), None
    if codes and experts.activation_key is not None:
        x, scale = quantize_activation(x, experts.activation_key)
    experts.apply(
        output,
        x,
        weights,
        topk_weights=_meta(tokens, config.top_k, dtype=torch.float32),
        topk_ids=_meta(tokens, config.top_k, dtype=torch.int32),
        workspace=workspace,
        expert_map=_meta(config.num_experts, dtype=torch.int32) if mapped else None,
        expert_tokens=ExpertTokensMetadata(_meta(config.local_experts, dtype=torch.int32)),
        hidden_states_scale=scale,
        lora=lora,
    )


def meta_layer_weights(experts: GroupedExperts, *, more_groups: bool = False) -> KernelWeights:
    """Return converted meta weights of a layer.

    Args:
        experts: Instance of an experts class.
        more_groups: Whether rows have one more group of columns than their length implies.

    Returns:
        The weights, in the backend's layout.
    """
    given = example_weights(experts.config, experts.weight_key, experts.activation_key, "meta")
    if more_groups:
        suffixes = ("w13_scale", "w2_scale", "w13_zero_point", "w2_zero_point")
        wider = {name: F.pad(tensor, (0, 1)) for name, tensor in given.tensors() if name in suffixes}
        given = replace(given, **wider)  # type: ignore[arg-type]
    return experts.convert(given)


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
