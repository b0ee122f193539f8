"""From config.json and the tensors beside the experts to the layer's FusedMoEConfig and its router."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core.activation import ActivationParams, MoEActivation
from moe_core.checkpoint import config_keys as keys
from moe_core.checkpoint.config_keys import ConfigKeys
from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.families import UNROUTABLE, Family, family_of
from moe_core.config import FusedMoEConfig
from moe_core.errors import CheckpointError, ConfigError
from moe_core.routing import RoutingConfig

# beside the experts, under the block's prefix
ROUTER_WEIGHTS = (
    "gate.weight",
    "router.weight",
    "router.layer.weight",
    "router.gate.weight",
    "router.classifier.weight",
    "gate.wg.weight",
)
ROUTER_BIASES = ("router.bias",)
CORRECTION_BIASES = (
    "gate.e_score_correction_bias",
    "e_score_correction_bias",
    "router.e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "gate.expert_bias",
    "expert_bias",
)
# a correction bias where the family has one, a plain bias of the router elsewhere
AMBIGUOUS_BIASES = ("gate.bias",)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class LayerModel:
    """What a layer is, apart from its experts' weights.

    - ``router_weight`` [E, K], ``router_bias`` [E]: None where the checkpoint has none (or a quantised one)
    - ``correction_bias`` [E] float32: where the routing has one
    - ``routing_reason``: why ``config.routing`` is None, if it is
    - ``routing_note``: what of ``config.routing`` is assumed, because neither config.json nor the family says it
    """

    config: FusedMoEConfig
    router_weight: Tensor | None
    router_bias: Tensor | None
    correction_bias: Tensor | None
    routing_reason: str | None
    routing_note: str | None


def read_model(
    layer: LayerExperts, *, dtype: torch.dtype = torch.bfloat16, num_local_experts: int | None = None
) -> LayerModel:
    """Read the description of ``layer``; CheckpointError names the key or tensor that is missing or contradicts."""
    checkpoint = layer.checkpoint
    entries = ConfigKeys.of(checkpoint.config, checkpoint.path / "config.json", layer.index)
    family = family_of(entries.model_type)

    experts_key, experts = entries.integer(keys.NUM_EXPERTS)
    if experts != layer.num_experts:
        raise entries.error(
            f"{experts_key} is {experts}, but {layer.prefix} holds {layer.num_experts} experts"
            + (f": expert {layer.num_experts} is missing" if layer.num_experts < experts else "")
        )
    top_k_key, top_k = entries.integer(keys.TOP_K)
    if top_k > experts:
        raise entries.error(f"{top_k_key} is {top_k}, more than the {experts} experts of {experts_key}")
    expert_size = entries.find(keys.EXPERT_SIZE)
    _, inter = entries.integer(keys.EXPERT_SIZE if expert_size is not None else keys.DENSE_SIZE)
    _, hidden = entries.integer(keys.HIDDEN_SIZE)
    # Nemotron's latent experts work on a projection of the hidden states, its router on those themselves
    latent = entries.optional_integer(("moe_latent_size",))

    may_correct = family is None or family.bias
    correction = _beside(layer, CORRECTION_BIASES + (AMBIGUOUS_BIASES if may_correct else ()))
    routing, reason = _routing(entries, family, correction is not None, experts, top_k)
    note = None if routing is None or family is not None else _assumed(entries, routing)
    if routing is not None and routing.has_correction_bias and correction is None:
        raise CheckpointError(
            f"{layer.block}.{CORRECTION_BIASES[0]} is missing in {checkpoint.path}: "
            f"models of type {entries.model_type} choose experts with it"
        )
    activation, params = _activation(entries, family, layer)
    try:
        config = FusedMoEConfig(
            num_experts=experts,
            top_k=top_k,
            hidden_size=latent or hidden,
            intermediate_size=inter,
            activation=activation,
            activation_params=params,
            dtype=dtype,
            num_local_experts=num_local_experts,
            routing=routing,
            has_bias=layer.has_bias,
            apply_router_weight_on_input=family is not None and family.weight_on_input,
        )
    except ConfigError as error:
        raise entries.error(str(error)) from error
    uses_bias = routing is not None and routing.has_correction_bias
    return LayerModel(
        config=config,
        router_weight=None if latent else _router_weight(layer, config),
        router_bias=_vector(layer, _beside(layer, ROUTER_BIASES + (() if may_correct else AMBIGUOUS_BIASES)), experts),
        correction_bias=_vector(layer, correction, experts) if uses_bias else None,
        routing_reason=reason,
        routing_note=note,
    )


def _routing(
    entries: ConfigKeys, family: Family | None, has_bias: bool, experts: int, top_k: int
) -> tuple[RoutingConfig | None, str | None]:
    """The routing, or None and why it is not known."""
    model_type = entries.model_type
    if model_type in UNROUTABLE:
        return None, f"routing of model_type {model_type!r} is not computed here: {UNROUTABLE[model_type]}"
    scoring = entries.text(keys.SCORING)
    renormalize = entries.boolean(keys.RENORMALIZE)
    if family is None:
        if renormalize is None:
            return None, (
                f"{entries.file}: model_type {model_type!r} is not known, "
                f"and no {keys.RENORMALIZE[0]} says how it routes"
            )
        family = Family(scoring="sigmoid" if has_bias else "softmax", bias=has_bias, grouped=True)
    if renormalize is None or family.fixed_renormalize:
        renormalize = family.renormalize
    method = entries.text(("topk_method",))
    groups = entries.optional_integer(keys.GROUPS) if family.grouped and method != "greedy" else None
    top_groups = None
    if groups is not None and groups > 1:
        top_groups = entries.integer(keys.TOP_GROUPS)[1]
    else:
        groups = None
    try:
        routing = RoutingConfig(
            scoring_func=scoring or family.scoring,
            renormalize=renormalize,
            score_selected_only=family.selected_only,
            num_expert_group=groups,
            topk_group=top_groups,
            routed_scaling_factor=_scaling(entries),
            has_correction_bias=_has_correction_bias(entries, family, method, has_bias),
        )
        routing.check(num_experts=experts, top_k=top_k)
    except ConfigError as error:
        raise entries.error(str(error)) from error
    return routing, None


def _assumed(entries: ConfigKeys, routing: RoutingConfig) -> str | None:
    """What is assumed of an unknown family's routing."""
    if entries.text(keys.SCORING) is not None:
        return None
    bias = ", chosen with a correction bias," if routing.has_correction_bias else ""
    return (
        f"{entries.file}: model_type {entries.model_type!r} is not known, and no {keys.SCORING[0]} says how it scores "
        f"experts; routing is assumed to be {routing.scoring_func} over all experts{bias} "
        f"with {'' if routing.renormalize else 'no '}renormalisation"
    )


def _scaling(entries: ConfigKeys) -> float:
    found = entries.find(keys.SCALING)
    factor = entries.number(keys.SCALING, None)
    if found is None or factor is None:
        return 1.0
    if factor <= 0:
        raise entries.error(f"{found[0]} is {found[1]!r}, expected a number greater than 0")
    return factor


def _has_correction_bias(entries: ConfigKeys, family: Family, method: str | None, has_bias: bool) -> bool:
    switch = entries.boolean(("use_expert_bias", "use_routing_bias", "moe_router_enable_expert_bias"))
    if switch is False or family.selected_only:
        return False
    return has_bias or (family.bias and method in (None, "noaux_tc"))


def _activation(
    entries: ConfigKeys, family: Family | None, layer: LayerExperts
) -> tuple[MoEActivation, ActivationParams | None]:
    if family is not None and family.activation is not None:
        activation = family.activation
    else:
        name = entries.text(keys.ACTIVATION)
        if name is None:
            raise entries.error(f"has no {' or '.join(keys.ACTIVATION)}")
        try:
            activation = MoEActivation.parse(name if layer.is_gated or name.endswith("_no_mul") else f"{name}_no_mul")
        except ConfigError as error:
            raise entries.error(str(error)) from error
    if activation.is_gated != layer.is_gated:
        found = "a gate" if layer.is_gated else "no gate"
        raise entries.error(f"the activation is {activation.value}, but {layer.prefix} has {found}")
    limit = entries.number(("swiglu_limit",), None)
    alpha = entries.number(("swiglu_alpha",), None) if "alpha" in activation.parameters else None
    if limit is None and alpha is None:
        # "null" says that there is no limit; nothing at all leaves the activation's own
        stated = "swiglu_limit" in entries.entries
        return activation, ActivationParams(limit=math.inf) if stated else None
    try:
        params = ActivationParams(alpha=alpha, limit=limit if limit != 0 else math.inf)
        activation.resolve_params(params)
    except ConfigError as error:
        raise entries.error(str(error)) from error
    return activation, params


def _beside(layer: LayerExperts, names: tuple[str, ...]) -> str | None:
    return next((name for end in names if (name := f"{layer.block}.{end}") in layer.checkpoint), None)


def _router_weight(layer: LayerExperts, config: FusedMoEConfig) -> Tensor | None:
    name = _beside(layer, ROUTER_WEIGHTS)
    if name is None or layer.checkpoint.info(name).dtype not in _FLOATS:
        return None
    info = layer.checkpoint.info(name)
    if info.shape[:1] != (config.num_experts,) or len(info.shape) != 2:
        raise CheckpointError(f"{name} is {info}, expected [{config.num_experts}, {config.hidden_size}]")
    if info.shape[1] != config.hidden_size:
        raise CheckpointError(
            f"{name} is {info}, expected [{config.num_experts}, {config.hidden_size}] "
            f"(hidden size of {layer.checkpoint.path / 'config.json'})"
        )
    weight = layer.checkpoint.tensor(name).clone()
    _check_finite(name, weight)
    return weight


def _vector(layer: LayerExperts, name: str | None, size: int) -> Tensor | None:
    """float32 [size] of the tensor ``name`` (stored as [size] or [1, size])."""
    if name is None:
        return None
    info = layer.checkpoint.info(name)
    if info.shape not in ((size,), (1, size)) or info.dtype not in _FLOATS:
        raise CheckpointError(f"{name} is {info}, expected floating point [{size}]")
    values = layer.checkpoint.tensor(name).float().reshape(size).clone()
    _check_finite(name, values)
    return values


def _check_finite(name: str, values: Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(f"{name} holds NaN or Inf")
