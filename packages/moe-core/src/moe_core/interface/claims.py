"""What an experts class can do, as data.

From the same declaration come the selection, the table that ``moe backends``
prints, and the cases of the conformance kit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import torch

from moe_core.errors import ConfigError
from moe_core.spec.activation import MoEActivation
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.spec.device import DeviceInfo, DeviceRange
from moe_core.spec.environment import Environment, Requirement
from moe_core.spec.quant_key import KeyPattern, QuantKey, check_one_level, key_name
from moe_core.spec.routing import RoutingMethodType

KeyClaim = QuantKey | KeyPattern | None

GATED = frozenset(a for a in MoEActivation if a.is_gated)
NON_GATED = frozenset(a for a in MoEActivation if not a.is_gated)


def expand_key(claim: KeyClaim) -> tuple[QuantKey | None, ...]:
    """Every key that a claim covers."""
    return claim.expand() if isinstance(claim, KeyPattern) else (claim,)


def key_matches(claim: KeyClaim, key: QuantKey | None) -> bool:
    """Whether a claimed key or pattern covers ``key`` (None: not quantised)."""
    if isinstance(claim, KeyPattern):
        return key is not None and claim.matches(key)
    return claim == key


def dtype_reason(dtype: torch.dtype, taken: frozenset[torch.dtype]) -> str:
    """The reason against hidden states in ``dtype`` where only those of ``taken`` are."""
    name, *names = (str(d).removeprefix("torch.") for d in (dtype, *sorted(taken, key=str)))
    return f"does not take hidden states in {name}, takes {' or '.join(names)}"


def claim_name(claim: KeyClaim) -> str:
    """A claimed key by its name, a pattern with all of its choices; "16-bit" for None."""
    return str(claim) if isinstance(claim, KeyPattern) else key_name(claim)


@dataclass(frozen=True)
class Verified:
    """Hardware on which a conformance run passed for some of the claimed pairs of keys only."""

    hardware: str
    keys: tuple[tuple[KeyClaim, KeyClaim], ...]

    def __str__(self) -> str:
        pairs = "; ".join(f"{claim_name(w)} x {claim_name(a)}" for w, a in self.keys)
        return f"{self.hardware} for {pairs}"


#: what the fields of claims that hold several things hold
_ITEMS: dict[str, tuple[type, ...]] = {
    "devices": (DeviceRange,),
    "keys": (tuple,),
    "activations": (MoEActivation,),
    "dtypes": (torch.dtype,),
    "formats": (FusedMoEActivationFormat,),
    "routing_methods": (RoutingMethodType,),
    "all2all": (str,),
    "requires": (Requirement,),
    "verified_on": (str, Verified),
}
_OPTIONAL = ("routing_methods", "all2all")
_KEYS = (QuantKey, KeyPattern, type(None))


@dataclass(frozen=True)
class Claims:
    """The declaration of one experts class.

    - ``devices``: it runs on any of these
    - ``keys``: (weight, activation) pairs; activation None: 16-bit activations
    - ``activations``; ``activation_limit``: whether a clamp limit is honoured beyond an activation's own default, or
      the activations of which it is
    - ``dtypes`` of hidden states and output
    - ``bias``, ``expert_map``, ``apply_router_weight_on_input``, ``lora``, ``batch_invariant``
    - ``formats``: activation formats
    - ``routing_methods``: for monolithic experts, those they compute; None for modular ones
    - ``hidden_multiple``, ``intermediate_multiple``: sizes must divide by these; with ``whole_groups`` also by the
      number of columns that share a scale of the weights
    - ``max_top_k``, ``max_experts``: 0 for no limit
    - ``cuda_graph``: may be captured; ``expects_unquantized_inputs``: quantises activations itself,
      so prepare must not
    - ``takes_quantized``: hidden states may be quantised before they come, where each token has scales of its own, so
      that they travel in half the bytes (see :attr:`moe_core.interface.experts.FusedMoEExperts.takes_quantized`)
    - ``reduces``: the experts apply the router weights and sum over top-k themselves
    - ``all2all``: names of the all-to-all backends that it works behind; None for all
    - ``rounds_products``: products are rounded to the dtype before their biases are added, so that more than a rounding
      of the sum is lost where the two cancel
    - ``rounds_scales``: scales of groups of columns that have more bits than the dtype are rounded to it before they
      multiply
    - ``keeps_nan``: a token of which a value is NaN has a result of NaN, and no other token has; so too an infinity,
      where the scales of activations are found at run time (a static scale saturates it)
    - ``allocates``: a library inside takes memory from torch's allocator on every call
    - ``requires``: what must be installed
    - ``verified_on``: hardware on which its conformance run passed, for all keys or (:class:`Verified`) for some;
      everything else was at most compiled
    """

    devices: tuple[DeviceRange, ...]
    keys: tuple[tuple[KeyClaim, KeyClaim], ...]
    activations: frozenset[MoEActivation]
    dtypes: frozenset[torch.dtype] = frozenset({torch.bfloat16, torch.float16})
    activation_limit: bool | frozenset[MoEActivation] = True
    bias: bool = False
    expert_map: bool = True
    apply_router_weight_on_input: bool = False
    lora: bool = False
    batch_invariant: bool = False
    formats: frozenset[FusedMoEActivationFormat] = frozenset({FusedMoEActivationFormat.STANDARD})
    routing_methods: frozenset[RoutingMethodType] | None = None
    hidden_multiple: int = 1
    intermediate_multiple: int = 1
    whole_groups: bool = False
    max_top_k: int = 0
    max_experts: int = 0
    cuda_graph: bool = True
    expects_unquantized_inputs: bool = True
    takes_quantized: bool = False
    reduces: bool = True
    all2all: frozenset[str] | None = None
    rounds_products: bool = False
    rounds_scales: bool = False
    keeps_nan: bool = True
    allocates: bool = False
    requires: tuple[Requirement, ...] = ()
    verified_on: tuple[str | Verified, ...] = ()
    notes: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name, kinds in _ITEMS.items():
            items: object = getattr(self, name)
            if items is None and name in _OPTIONAL:
                continue
            if not isinstance(items, (tuple, frozenset, set)) or not all(isinstance(item, kinds) for item in items):
                names = " or ".join(kind.__name__ for kind in kinds)
                raise ConfigError(f"claims: {name} is {items!r}, expected a tuple or a set of {names}")
        pairs: tuple[tuple[object, ...], ...] = self.keys
        if not all(len(pair) == 2 and all(isinstance(key, _KEYS) for key in pair) for pair in pairs):
            raise ConfigError(f"claims: keys is {self.keys!r}, expected pairs of QuantKey, KeyPattern or None")
        for declared in fields(self):
            value: object = getattr(self, declared.name)
            if type(declared.default) is int and (type(value) is not int or value < declared.default):
                least = declared.default
                raise ConfigError(f"claims: {declared.name} is {value!r}, expected an int of at least {least}")
        if not self.devices or not self.keys or not self.activations or not self.dtypes or not self.formats:
            raise ConfigError("claims must name at least one device, key pair, activation, dtype and activation format")

    def limits(self, activation: MoEActivation) -> bool:
        """Whether a clamp limit of one's own is honoured with ``activation``."""
        limited = self.activation_limit
        return limited if isinstance(limited, bool) else activation in limited

    def verified_for(self, weight_key: QuantKey | None, activation_key: QuantKey | None) -> tuple[str, ...]:
        """Hardware on which this pair of keys was run."""
        return tuple(
            item if isinstance(item, str) else item.hardware
            for item in self.verified_on
            if isinstance(item, str)
            or any(key_matches(w, weight_key) and key_matches(a, activation_key) for w, a in item.keys)
        )

    def reasons_against(
        self,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        device: DeviceInfo,
        environment: Environment,
    ) -> list[str]:
        """Every reason why the claims do not cover the request; empty if they do.

        Raises ConfigError for a key with two levels of scales, claimed or not.
        """
        check_one_level(weight_key, "weight_key")
        check_one_level(activation_key, "activation_key")
        reasons: list[str] = []
        against = [r.reason_against(device) for r in self.devices]
        if all(reason is not None for reason in against):
            reasons.append(f"needs {' or '.join(map(str, self.devices))}, device is {device}")
        reasons += [r for r in map(environment.reason_against, self.requires) if r is not None]
        reasons += self._key_reasons(weight_key, activation_key)
        shared = (
            activation_key is not None and not activation_key.is_static and activation_key.group_shape.is_per_tensor
        )
        if config.batch_invariant and shared:
            reasons.append("is not batch invariant with a dynamic scale that all tokens share")
        reasons += self._layer_reasons(config, weight_key)
        return reasons

    def multiples(self, weight_key: QuantKey | None) -> tuple[int, int]:
        """What hidden and intermediate size must divide by, with weights of ``weight_key``."""
        group = self._group(weight_key)
        return math.lcm(self.hidden_multiple, group), math.lcm(self.intermediate_multiple, group)

    def _group(self, weight_key: QuantKey | None) -> int:
        return 1 if weight_key is None or not self.whole_groups else max(weight_key.group_size, 1)

    def takes_keys(self, weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        """Whether these weights and activations are claimed together."""
        return any(key_matches(w, weight_key) and key_matches(a, activation_key) for w, a in self.keys)

    def _key_reasons(self, weight_key: QuantKey | None, activation_key: QuantKey | None) -> list[str]:
        if self.takes_keys(weight_key, activation_key):
            return []
        with_weight = [a for w, a in self.keys if key_matches(w, weight_key)]
        if not with_weight:
            return [f"does not read weights quantised as {weight_key or 'nothing (16-bit)'}"]
        offered = "; ".join("16-bit" if a is None else str(a) for a in with_weight)
        return [f"does not take activations quantised as {activation_key or 'nothing (16-bit)'}, takes {offered}"]

    def _layer_reasons(self, config: FusedMoEConfig, weight_key: QuantKey | None) -> list[str]:
        reasons = []
        group = self._group(weight_key)
        hidden_multiple, intermediate_multiple = self.multiples(weight_key)
        if config.activation not in self.activations:
            reasons.append(f"does not compute the activation {config.activation.value}")
        elif not self.limits(config.activation) and config.params.limit != config.activation.default_params().limit:
            reasons.append(f"does not clamp the activation {config.activation.value} to {config.params.limit}")
        if config.dtype not in self.dtypes:
            reasons.append(dtype_reason(config.dtype, self.dtypes))
        if config.has_bias and not self.bias:
            reasons.append("does not add biases")
        if config.local_experts < config.num_experts and not self.expert_map:
            reasons.append("does not take an expert map (expert parallelism)")
        if config.apply_router_weight_on_input and not self.apply_router_weight_on_input:
            reasons.append("does not apply the router weight on the input")
        if config.activation_format not in self.formats:
            reasons.append(f"does not take the {config.activation_format.value} activation format")
        if config.is_lora_enabled and not self.lora:
            reasons.append("does not apply LoRA adapters")
        if config.batch_invariant and not self.batch_invariant:
            reasons.append("is not batch invariant")
        for name, size, multiple in (
            ("hidden_size", config.hidden_size, hidden_multiple),
            ("intermediate_size", config.intermediate_size, intermediate_multiple),
        ):
            if size % multiple:
                why = f", for whole groups of {group}" if group > 1 else ""
                reasons.append(f"needs {name} to be a multiple of {multiple}{why}, got {size}")
        if self.max_top_k and config.top_k > self.max_top_k:
            reasons.append(f"needs top_k <= {self.max_top_k}, got {config.top_k}")
        if self.max_experts and config.local_experts > self.max_experts:
            reasons.append(f"needs at most {self.max_experts} local experts, got {config.local_experts}")
        parallel = config.parallel
        if self.all2all is not None and parallel.use_all2all_kernels and parallel.all2all_backend not in self.all2all:
            reasons.append(f"does not work behind the all-to-all backend {parallel.all2all_backend}")
        if self.routing_methods is not None:
            method = config.routing.method if config.routing is not None else None
            if method is None:
                reasons.append("routes by itself, and the config names no routing")
            elif method not in self.routing_methods:
                reasons.append(f"does not compute the routing method {method.name}")
        return reasons
