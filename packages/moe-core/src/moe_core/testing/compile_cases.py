"""Launches of a backend to compile: all that it claims, in layers of real and of odd sizes.

Weights, activations and workspaces are meta tensors, converted and called as in a user's layer. So a claimed key, dtype
or activation is compiled without further declarations. Keys and token counts are combined with each other; layers,
dtypes, formats and features rotate.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_core.errors import MoEError
from moe_core.interface.experts import ExpertTokensMetadata, FusedMoEExperts
from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.kernels.launch.example import Specimen
from moe_core.kernels.launch.launch import Launch, record
from moe_core.kernels.ops.quantize import quantize_activation
from moe_core.selection.memory import specimen as meta_weights
from moe_core.selection.registry import registry
from moe_core.spec.activation import MoEActivation
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import Environment
from moe_core.spec.lora import LoRA, LoRAWeights
from moe_core.spec.quant_key import KeyPattern, QuantKey
from moe_core.spec.weights import KernelWeights

#: name, experts, top-k, hidden size and intermediate size
LAYERS = (
    ("deepseek-v3", 16, 8, 7168, 2048),
    ("qwen3", 16, 8, 2048, 768),
    ("nemotron", 16, 6, 2688, 1856),
    ("odd", 6, 2, 1104, 1000),
    ("one", 8, 1, 1024, 512),
)
#: token counts whose launch configurations are examined; each distinct one is compiled
TOKENS = (1, 2, 8, 24, 40, 80, 160, 400, 1200, 5000)
#: token counts up to this one are examined in every format: small M uses dedicated kernels, except in the batched
#: format
FEW_TOKENS = 2


@dataclass(frozen=True)
class Feature:
    """Optional features of a case.

    Attributes:
        name: Name of the feature.
        activation: Activation function.
        bias: Whether the experts have biases.
        mapped: Whether the rank holds half of the experts, with an expert map.
        on_input: Whether the router weight is applied on the input.
        lora: Whether LoRA is enabled.
    """

    name: str
    activation: MoEActivation = MoEActivation.SILU
    bias: bool = False
    mapped: bool = False
    on_input: bool = False
    lora: bool = False


FEATURES = (
    Feature("silu"),
    Feature("relu2_no_mul", MoEActivation.RELU2_NO_MUL),
    Feature("bias", MoEActivation.SWIGLUOAI, bias=True, mapped=True),
    Feature("lora", lora=True),
    Feature("on_input", on_input=True),
    Feature("gelu", MoEActivation.GELU, mapped=True),
)

#: the rotating properties of one case
Turn = tuple[Feature, torch.dtype, FusedMoEActivationFormat]


def backend_specimens(target: DeviceInfo, packages: Collection[str]) -> Iterator[Specimen]:
    """Yield launches of registered experts that claim a target.

    Args:
        target: The target to compile for.
        packages: Top-level packages whose experts are used.

    Yields:
        Specimens of the experts classes that derive from :class:`GroupedExperts`.
    """
    seen: set[type[FusedMoEExperts]] = set()
    for oracle in registry().oracles():
        for backend in oracle.table():
            for experts in backend.load():
                if experts not in seen and issubclass(experts, GroupedExperts) and _package(experts) in packages:
                    seen.add(experts)
                    yield from experts_specimens(experts, target)


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


def experts_specimens(experts: type[GroupedExperts], target: DeviceInfo) -> Iterator[Specimen]:
    """Yield the launches of one experts class.

    Args:
        experts: Experts class.
        target: The target to compile for.

    Yields:
        The specimens.
    """
    claims, environment = experts.claims, Environment.current()
    formats = sorted(claims.formats, key=lambda item: item.value)
    turns = itertools.cycle(itertools.product(FEATURES, sorted(claims.dtypes, key=str), formats))
    for number, (weight_key, activation_key) in enumerate(key_pairs(experts)):
        # Every layer occurs with some key, and every key with some layer.
        name, count, top_k, hidden, size = LAYERS[number % len(LAYERS)]
        found: set[object] = set()
        for tokens, (feature, dtype, layout) in calls(turns, formats):
            config = FusedMoEConfig(count, top_k, hidden, size, dtype=dtype, activation_format=layout)
            for wanted in (feature, FEATURES[0]):
                changed = _with(config, wanted)
                if changed is None or experts.unsupported_reasons(
                    changed, weight_key, activation_key, target, environment
                ):
                    continue
                made = experts(changed, weight_key=weight_key, activation_key=activation_key, device=target)
                # Rows of four-byte elements take more shared memory if they are quantized on load.
                plan = (made.plan(tokens), made.gemv_plan(tokens), dtype.itemsize)
                if plan in found:
                    continue
                found.add(plan)
                text = f"{experts.__name__} {str(weight_key).partition(' ')[0]} {name} {tokens} {wanted.name}"
                rows = experts.accepted_spills
                accepted = rows[0] if hidden % 16 == size % 16 == 0 else rows[1]
                if wanted.lora:
                    accepted = max(accepted, experts.accepted_lora_spills)
                yield Specimen(text, partial(call_on_meta, made, tokens, mapped=wanted.mapped), accepted)
                break
        if weight_key is not None and weight_key.permuted and weight_key.group_size != -1:
            yield from _shards(experts, weight_key, activation_key, target)
    yield from _invariant(experts, target)
    yield from _codes(experts, target)
    yield from _conversions(experts, target)


def calls(turns: Iterator[Turn], formats: Collection[FusedMoEActivationFormat]) -> Iterator[tuple[int, Turn]]:
    """Yield each token count with the next rotating properties.

    Args:
        turns: The rotating properties.
        formats: Claimed activation formats.

    Yields:
        (token count, properties); a few tokens come with those properties in every format.
    """
    for tokens in TOKENS:
        feature, dtype, next_format = next(turns)
        for layout in formats if tokens <= FEW_TOKENS else (next_format,):
            yield tokens, (feature, dtype, layout)
    # Skip one combination: with ten for each key, a token count would have the same format with every key.
    next(turns)


def _invariant(experts: type[GroupedExperts], target: DeviceInfo) -> Iterator[Specimen]:
    """Yield launches of a batch-invariant layer, whose plans no other layer has."""
    name, count, top_k, hidden, size = LAYERS[1]
    claims, environment = experts.claims, Environment.current()
    dtype = min(claims.dtypes, key=str)
    config = FusedMoEConfig(count, top_k, hidden, size, dtype=dtype, batch_invariant=True)
    config = replace(config, activation_format=max(claims.formats, key=lambda item: item.value))
    for keys in key_pairs(experts):
        if not experts.unsupported_reasons(config, *keys, target, environment):
            made = experts(config, weight_key=keys[0], activation_key=keys[1], device=target)
            plans = {made.plan(tokens): tokens for tokens in TOKENS}
            for tokens in plans.values():
                text = f"{experts.__name__} {str(keys[0]).partition(' ')[0]} {name} {tokens} invariant"
                yield Specimen(text, partial(call_on_meta, made, tokens), experts.accepted_spills[0])
            return


def _codes(experts: type[GroupedExperts], target: DeviceInfo) -> Iterator[Specimen]:
    """Yield launches on hidden states that arrive quantized, as other ranks send them.

    They have few rows, or enough rows to be reordered first.
    """
    name, count, top_k, hidden, size = LAYERS[1]
    config = FusedMoEConfig(count, top_k, hidden, size)
    for number, keys in enumerate(key_pairs(experts)):
        if experts.unsupported_reasons(config, *keys, target, Environment.current()):
            continue
        made = experts(config, weight_key=keys[0], activation_key=keys[1], device=target)
        if made.takes_quantized:
            tokens = (24, 5000)[number % 2]
            text = f"{experts.__name__} {str(keys[0]).partition(' ')[0]} {name} {tokens} codes"
            yield Specimen(text, partial(call_on_meta, made, tokens, codes=True), experts.accepted_spills[0])


def _conversions(experts: type[GroupedExperts], target: DeviceInfo) -> Iterator[Specimen]:
    """Yield the launches that convert weights to the backend's layout, if there are any."""
    name, count, top_k, hidden, size = LAYERS[1]
    config = FusedMoEConfig(count, top_k, hidden, size, dtype=min(experts.claims.dtypes, key=str))
    for keys in key_pairs(experts):
        if not experts.unsupported_reasons(config, *keys, target, Environment.current()):
            made = experts(config, weight_key=keys[0], activation_key=keys[1], device=target)
            with record() as launches:
                meta_layer_weights(made)
            if launches:
                text = f"{experts.__name__} {str(keys[0]).partition(' ')[0]} {name} conversion"
                yield Specimen(text, partial(_start, launches))


def _start(launches: Sequence[Launch]) -> None:
    for one in launches:
        one.kernel[one.grid](*one.arguments.values(), **one.options)


def _shards(
    experts: type[GroupedExperts], weight_key: QuantKey, activation_key: QuantKey | None, target: DeviceInfo
) -> Iterator[Specimen]:
    """Yield launches of a rank's shard that has more column groups than its size implies.

    Rows with an activation order are split between ranks. Their groups are padded to full size, so the GEMM addresses
    columns one by one. There are layers with and without pre-scales.
    """
    count, top_k, hidden, size = LAYERS[3][1:]
    # Columns are read one by one, so sizes need not be multiples of anything.
    config = FusedMoEConfig(count, top_k, hidden - 3, size + 3, dtype=torch.float16)
    for pre_scaled in (False, True):
        key = replace(weight_key, pre_scaled=pre_scaled)
        if experts.unsupported_reasons(config, key, activation_key, target, Environment.current()):
            continue
        made = experts(config, weight_key=key, activation_key=activation_key, device=target)
        for tokens in (1, 300):
            text = f"{experts.__name__} {str(key).partition(' ')[0]} shard {tokens}"
            yield Specimen(text, partial(call_on_meta, made, tokens, more_groups=True), experts.accepted_spills[1])


def _with(config: FusedMoEConfig, feature: Feature) -> FusedMoEConfig | None:
    """Return the layer with a feature, or None if there is no such layer."""
    changes: dict[str, object] = {"activation": feature.activation, "has_bias": feature.bias}
    if feature.lora:
        changes |= {"is_lora_enabled": True, "max_loras": 4, "max_lora_rank": 16}
    if feature.mapped and config.activation_format is FusedMoEActivationFormat.STANDARD:
        changes["num_local_experts"] = config.num_experts // 2
    if feature.on_input:
        changes["apply_router_weight_on_input"] = True
    try:
        return replace(config, **changes)  # type: ignore[arg-type]
    except MoEError:
        return None


def call_on_meta(
    experts: GroupedExperts, tokens: int, *, mapped: bool = False, more_groups: bool = False, codes: bool = False
) -> None:
    """Call a layer once on meta tensors, with the launches of a GPU.

    `moe_core.kernels.launch.launch.record` collects the launches.

    Args:
        experts: Instance of an experts class.
        tokens: Number of tokens.
        mapped: Whether to pass an expert map.
        more_groups: Whether rows have one more group of columns than their length implies.
        codes: Whether hidden states arrive quantized.
    """
    config = experts.config
    weights = meta_layer_weights(experts, more_groups=more_groups)
    workspace = {spec.name: _meta(*spec.shape, dtype=spec.dtype) for spec in experts.workspaces(tokens)}
    shape = (config.local_experts, tokens) if experts.batched else (tokens,)
    x = _meta(*shape, config.hidden_size, dtype=config.dtype)
    mapped = mapped and not experts.batched
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
    """Return converted meta weights of one expert, expanded to all experts.

    Args:
        experts: Instance of an experts class.
        more_groups: Whether rows have one more group of columns than their length implies.

    Returns:
        The weights, in the backend's layout.
    """
    weight_key, activation_key, config = experts.weight_key, experts.activation_key, experts.config
    one = replace(config, num_local_experts=1)
    made = type(experts)(one, weight_key=weight_key, activation_key=activation_key, device=experts.device_info)
    given = meta_weights(one, weight_key, activation_key, "meta")
    if more_groups:

        def wider(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else F.pad(tensor, (0, 1))

        given = replace(
            given,
            w13_scale=wider(given.w13_scale),
            w2_scale=wider(given.w2_scale),
            w13_zero_point=wider(given.w13_zero_point),
            w2_zero_point=wider(given.w2_zero_point),
        )
    converted = made.convert(given)

    def stacked(tensor: Tensor) -> Tensor:
        shape = (experts.config.local_experts, *tensor.shape[1:])
        return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return KernelWeights(
        w13=stacked(converted.w13),
        w2=stacked(converted.w2),
        quant_config=converted.quant_config.map(stacked),
        extra={name: stacked(tensor) for name, tensor in converted.extra.items()},
    )


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _package(experts: type[FusedMoEExperts]) -> str:
    return experts.__module__.partition(".")[0]
