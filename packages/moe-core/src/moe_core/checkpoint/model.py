"""Build a layer's FusedMoEConfig and router from config.json and the router's tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core.checkpoint.config import keys as keys
from moe_core.checkpoint.config.families import FAMILIES, Family, family_of, guess, refusal_of
from moe_core.checkpoint.config.keys import ConfigKeys
from moe_core.checkpoint.config.routing_keys import BY_HAND, read_routing
from moe_core.checkpoint.config.unread import unread_entries
from moe_core.checkpoint.experts.find_layer import left_out
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.router import BIASES, CORRECTION_BIASES, RouterTensors
from moe_core.errors import ConfigError, check_instance, did_you_mean
from moe_core.spec.activation import ActivationParams, MoEActivation
from moe_core.spec.config import FusedMoEConfig, as_dtype, whole_number
from moe_core.spec.routing import RoutingConfig

#: Value of ``ModelSettings.routing`` for layers whose calls pass topk_weights and topk_ids.
PER_CALL = "per_call"


@dataclass(frozen=True)
class ModelSettings:
    """Settings from the caller that override config.json.

    Attributes:
        routing: A RoutingConfig, its text form (:meth:`~moe_core.spec.routing.RoutingConfig.parse`), or
            ``"per_call"``.
        activation: The experts' activation.
        activation_params: Parameters of ``activation``; require it.
        assume: Whether settings missing for an unknown model_type may be guessed.
        top_k: Number of experts per token.
    """

    routing: RoutingConfig | str | None = None
    activation: MoEActivation | str | None = None
    activation_params: ActivationParams | None = None
    assume: bool = False
    top_k: int | None = None

    def __post_init__(self) -> None:
        if self.top_k is not None:
            object.__setattr__(self, "top_k", whole_number("top_k", self.top_k))
        check_instance("routing", self.routing, RoutingConfig, str, type(None))
        check_instance("activation", self.activation, MoEActivation, str, type(None))
        check_instance("activation_params", self.activation_params, ActivationParams, type(None))
        check_instance("assume", self.assume, bool)
        if self.activation_params is not None and self.activation is None:
            raise ConfigError("activation_params needs activation, which is None")


@dataclass(frozen=True, eq=False)
class LayerModel:
    """Description of a layer without its experts' weights.

    Attributes:
        config: The layer's configuration.
        router_weight: [E, K], or None if the checkpoint has none or a quantized one.
        router_bias: [E] float32, or None if the checkpoint has none.
        correction_bias: [E] float32, or None if the routing has none.
        routing_reason: Why ``config.routing`` is None; None if the layer has a routing.
        assumed: What was guessed for an unknown family; None if nothing was.
    """

    config: FusedMoEConfig
    router_weight: Tensor | None
    router_bias: Tensor | None
    correction_bias: Tensor | None
    routing_reason: str | None
    assumed: str | None


def read_model(
    layer: LayerExperts,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_local_experts: int | None = None,
    settings: ModelSettings | None = None,
) -> LayerModel:
    """Read the configuration and the router of a layer.

    Args:
        layer: The layer's expert tensors.
        dtype: dtype of the hidden states.
        num_local_experts: Number of experts on this rank; default all.
        settings: Settings from the caller that override config.json.

    Returns:
        The layer's description without its experts' weights.

    Raises:
        CheckpointError: A key or tensor is missing or contradictory, or the ``model_type`` is unknown and ``settings``
            neither has both routing and activation nor allows a guess. The message names the key or tensor.
    """
    dtype = as_dtype(dtype)
    settings = settings or ModelSettings()
    checkpoint = layer.checkpoint
    entries = ConfigKeys.of(checkpoint.config, checkpoint.path / "config.json", layer.index, layer.stack)
    known = _known(entries, settings)
    router = RouterTensors(layer, known)
    family = known or guess(corrects=router.correction is not None)
    entries = entries.with_defaults({**family.reads, keys.ACTIVATION[0]: family.hidden_act})
    unread = unread_entries(entries, family, routing=settings.routing is None, activation=settings.activation is None)
    for key in unread:
        raise entries.error(
            f"{key} is {entries.entries[key]!r}, which is unknown for model_type {entries.model_type!r}: "
            f"{BY_HAND} or activation (--activation) that it stands for"
        )

    experts, top_k, hidden, inter = _sizes(entries, layer, settings)
    latent = entries.optional_integer(keys.LATENT_SIZE)
    routing, reason = _routing(entries, family, router, settings, experts, top_k)
    corrects = routing is not None and routing.has_correction_bias
    if settings.routing is None and reason is None:
        _check_router(entries, family, router, corrects=corrects)
    if corrects and router.correction is None:
        raise router.missing(CORRECTION_BIASES, f"models of type {entries.model_type} need it")
    activation, params = _activation(entries, family, layer, settings)
    if family.expert_bias and not layer.has_bias:
        raise entries.error(f"experts of model_type {entries.model_type!r} have biases, but {layer.prefix} has none")
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
            apply_router_weight_on_input=family.weight_on_input,
        )
    except ConfigError as error:
        raise entries.error(str(error)) from error
    # If each call passes its routing, the router's tensors are optional: the caller may still use the logits.
    routes = routing is not None
    return LayerModel(
        config=config,
        router_weight=None if latent else router.read_weight(hidden, strict=routes),
        router_bias=router.read_vector(router.bias, strict=routes),
        correction_bias=router.read_vector(router.correction) if corrects else None,
        routing_reason=reason,
        assumed=_assumed(entries, settings, routing, activation) if known is None else None,
    )


def _known(entries: ConfigKeys, settings: ModelSettings) -> Family | None:
    """Return the family, or None for an unknown one for which the caller gives enough settings."""
    model_type = entries.model_type
    refusal = refusal_of(model_type)
    if refusal is not None:
        raise entries.error(f"models of type {model_type!r} are not supported: {refusal}")
    family = family_of(model_type)
    if family is family_of("deepseek_v2") and entries.entries.get(keys.TOPK_METHOD[0]) == "noaux_tc":
        # DeepSeek-VL2 checkpoints select DeepSeek-V3's router with this entry.
        family = family_of("deepseek_v3")
    if family is None and not settings.assume and (settings.routing is None or settings.activation is None):
        found = f"model_type {model_type!r} is not known" if model_type else "has no model_type"
        raise entries.error(
            f"{found}{did_you_mean(model_type, FAMILIES)}: pass routing and activation (--routing, "
            "--activation), or accept assumed ones with assume=True (--assume)"
        )
    return family


def _sizes(entries: ConfigKeys, layer: LayerExperts, settings: ModelSettings) -> tuple[int, int, int, int]:
    """Return the number of experts, experts per token, hidden size and intermediate size."""
    experts_key, experts = entries.integer(keys.NUM_EXPERTS)
    if experts != layer.num_experts:
        raise entries.error(
            f"{experts_key} is {experts}, but {layer.prefix} holds {layer.num_experts} experts"
            + (f": expert {layer.num_experts} is missing" if layer.num_experts < experts else "")
            + left_out(layer.checkpoint, layer.index)
        )
    top_k = settings.top_k
    if top_k is None:
        if entries.find(keys.TOP_K) is None:
            raise entries.error(f"has no {' or '.join(keys.TOP_K)}: give top_k (--top-k)")
        top_k_key, top_k = entries.integer(keys.TOP_K)
        if top_k > experts:
            raise entries.error(f"{top_k_key} is {top_k}, more than the {experts} experts of {experts_key}")
    elif top_k > experts:
        raise ConfigError(f"top_k is {top_k}, expected at most {experts}: {layer.prefix} has that many experts")
    expert_size = entries.find(keys.EXPERT_SIZE)
    _, inter = entries.integer(keys.EXPERT_SIZE if expert_size is not None else keys.DENSE_SIZE)
    _, hidden = entries.integer(keys.HIDDEN_SIZE)
    return experts, top_k, hidden, inter


def _routing(
    entries: ConfigKeys, family: Family, router: RouterTensors, settings: ModelSettings, experts: int, top_k: int
) -> tuple[RoutingConfig | None, str | None]:
    """Return (routing, None), or (None, reason why the routing is not computed here)."""
    if settings.routing is not None:
        if settings.routing == PER_CALL:
            return None, "routing was left to each call"
        chosen = RoutingConfig.parse(settings.routing) if isinstance(settings.routing, str) else settings.routing
        chosen.check(num_experts=experts, top_k=top_k)
        return chosen, None
    model_type = entries.model_type
    if family.per_call is not None:
        return None, f"routing of model_type {model_type!r} is not supported: {family.per_call}"
    kind = entries.text(keys.LAYER_KIND)
    if "hash" in kind if kind is not None else router.layer.index < (entries.number(keys.HASH_LAYERS) or 0):
        return None, f"{router.layer.block} chooses experts by the ids of the tokens, which it is not given"
    if router.others:
        return None, f"{', '.join(router.others)} takes part in routing, which is not supported"
    if family_of(model_type) is None and entries.boolean(keys.RENORMALIZE) is None:
        return None, (
            f"{entries.file}: model_type {model_type!r} is not known, and no {keys.RENORMALIZE[0]} says how it routes"
        )
    return read_routing(entries, family, experts=experts, top_k=top_k, corrects=router.correction is not None), None


def _check_router(entries: ConfigKeys, family: Family, router: RouterTensors, *, corrects: bool) -> None:
    """Raise CheckpointError unless the router has exactly the family's tensors."""
    model_type = entries.model_type
    if family_of(model_type) is None:
        return
    if family.router_bias and router.bias is None and router.weight is not None:
        raise router.missing(BIASES, f"models of type {model_type} need it")
    spare = router.bias if not family.router_bias else None
    if not family.correction_bias:
        spare = spare or router.correction
    if spare is not None:
        raise entries.error(f"{spare} is unknown: routers of model_type {model_type!r} have no such tensor: {BY_HAND}")


def _assumed(
    entries: ConfigKeys, settings: ModelSettings, routing: RoutingConfig | None, activation: MoEActivation
) -> str | None:
    """Return a description of the settings guessed for an unknown family, or None."""
    guesses = []
    if settings.routing is None and routing is not None:
        bias = ", chosen with a correction bias," if routing.has_correction_bias else ""
        guesses.append(
            f"routing is assumed to be {routing.scoring_func} over all experts{bias} "
            f"with {'' if routing.renormalize else 'no '}renormalization"
        )
    if settings.activation is None:
        guesses.append(f"the activation is assumed to be {activation.value}")
    if not guesses:
        return None
    return f"{entries.file}: model_type {entries.model_type!r} is not known; {' and '.join(guesses)}"


def _activation(
    entries: ConfigKeys, family: Family, layer: LayerExperts, settings: ModelSettings
) -> tuple[MoEActivation, ActivationParams | None]:
    if settings.activation is not None:
        chosen = MoEActivation.parse(settings.activation)
        if settings.activation_params is not None:
            chosen.resolve_params(settings.activation_params)
        activation, params = chosen, settings.activation_params
    else:
        activation = _named(entries, family, layer)
        params = _params(entries, activation)
    if activation.is_gated != layer.is_gated:
        found = "a gate" if layer.is_gated else "no gate"
        raise entries.error(f"the activation is {activation.value}, but {layer.prefix} has {found}")
    return activation, params


def _named(entries: ConfigKeys, family: Family, layer: LayerExperts) -> MoEActivation:
    """Return the family's fixed activation, or the one that config.json names."""
    if family.activation is not None:
        # A stated name is either another activation, or SiLU as the inner function of the family's activation.
        entries = entries.with_defaults({})
    name = entries.text(keys.ACTIVATION)
    if name is None:
        if family.activation is not None:
            return family.activation
        raise entries.error(f"has no {' or '.join(keys.ACTIVATION)}")
    try:
        activation = MoEActivation.parse(name if layer.is_gated or name.endswith("_no_mul") else f"{name}_no_mul")
    except ConfigError as error:
        raise entries.error(str(error)) from error
    if family.activation is None:
        return activation
    if activation not in (family.activation, MoEActivation.SILU):
        raise entries.error(
            f"the activation is {name}, but that of model_type {entries.model_type!r} is {family.activation.value}: "
            f"give activation (--activation)"
        )
    return family.activation


def _params(entries: ConfigKeys, activation: MoEActivation) -> ActivationParams | None:
    own = activation.default_params()
    try:
        params = _stated_params(entries, activation)
        return None if activation.resolve_params(params) == own else params
    except ConfigError as error:
        raise entries.error(str(error)) from error


def _stated_params(entries: ConfigKeys, activation: MoEActivation) -> ActivationParams:
    """Return the parameters in config.json; None where they equal the activation's defaults."""
    if activation is MoEActivation.SITU:
        return ActivationParams(beta=entries.number(keys.SITU_BETA), limit=entries.number(keys.SITU_LIMIT))
    limit = entries.number(keys.SWIGLU_LIMIT)
    alpha = entries.number(keys.SWIGLU_ALPHA) if "alpha" in activation.parameters else None
    # null or 0 means no limit; a missing entry keeps the activation's default.
    if limit == 0 or (limit is None and keys.SWIGLU_LIMIT[0] in entries.defaults):
        limit = math.inf
    own = activation.default_params()
    return ActivationParams(alpha=None if alpha == own.alpha else alpha, limit=None if limit == own.limit else limit)
