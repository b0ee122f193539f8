"""Declarative description of what an experts class supports.

Backend selection, the table of ``moe backends`` and the test cases of the conformance kit are all derived from it.
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
from moe_core.spec.quant_key import KeyPattern, QuantKey, key_name
from moe_core.spec.routing import RoutingMethodType

KeyClaim = QuantKey | KeyPattern | None

GATED = frozenset(a for a in MoEActivation if a.is_gated)
NON_GATED = frozenset(a for a in MoEActivation if not a.is_gated)


def expand_key(claim: KeyClaim) -> tuple[QuantKey | None, ...]:
    """List every key that a claim covers.

    Args:
        claim: A key, a pattern, or None for 16 bits.

    Returns:
        The keys.
    """
    return claim.expand() if isinstance(claim, KeyPattern) else (claim,)


def key_matches(claim: KeyClaim, key: QuantKey | None) -> bool:
    """Whether a claimed key or pattern covers ``key``.

    Args:
        claim: The claimed key or pattern.
        key: The requested key; None: not quantized.

    Returns:
        True if it does.
    """
    if isinstance(claim, KeyPattern):
        return key is not None and claim.matches(key)
    return claim == key


def dtype_reason(dtype: torch.dtype, taken: frozenset[torch.dtype]) -> str:
    """Build the reason against hidden states in ``dtype``.

    Args:
        dtype: The requested dtype.
        taken: The supported dtypes.

    Returns:
        The reason.
    """
    name, *names = (str(d).removeprefix("torch.") for d in (dtype, *sorted(taken, key=str)))
    return f"does not take hidden states in {name}, takes {' or '.join(names)}"


def claim_name(claim: KeyClaim) -> str:
    """Name a claimed key, or a pattern with all of its choices; "16-bit" for None.

    Args:
        claim: The claimed key or pattern.

    Returns:
        The name.
    """
    return str(claim) if isinstance(claim, KeyPattern) else key_name(claim)


@dataclass(frozen=True)
class Verified:
    """Hardware on which the conformance kit passed for only some of the claimed key pairs.

    Attributes:
        hardware: Name of the hardware.
        keys: The (weight, activation) pairs that were run.
    """

    hardware: str
    keys: tuple[tuple[KeyClaim, KeyClaim], ...]

    def __str__(self) -> str:
        pairs = "; ".join(f"{claim_name(w)} x {claim_name(a)}" for w, a in self.keys)
        return f"{self.hardware} for {pairs}"


#: Item types of the fields that are collections.
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
    """Declaration of what one experts class supports.

    Attributes:
        devices: Supported devices; any of these ranges.
        keys: (weight, activation) pairs; activation None: 16-bit activations.
        activations: Supported activations.
        dtypes: Dtypes of hidden states and output.
        activation_limit: Whether a clamp limit other than the activation's default is supported, or the activations
            for which it is.
        bias: Biases are supported.
        expert_map: An expert map (expert parallelism) is supported.
        apply_router_weight_on_input: Router weights on the input are supported.
        lora: LoRA adapters are supported.
        batch_invariant: Results do not depend on the other tokens of the batch.
        formats: Supported activation formats.
        routing_methods: Routing methods of monolithic experts; None for modular ones.
        hidden_multiple: The hidden size must be a multiple of this.
        intermediate_multiple: The intermediate size must be a multiple of this.
        whole_groups: Both sizes must also be multiples of the number of columns that share a weight scale.
        max_top_k: Largest top-k; 0 for no limit.
        max_experts: Largest number of local experts; 0 for no limit.
        cuda_graph: Calls may be captured in CUDA graphs.
        expects_unquantized_inputs: The experts quantize activations themselves, so prepare must not.
        takes_quantized: Hidden states may arrive quantized if each token has separate scales, so that dispatch moves
            half the bytes (see :attr:`moe_core.interface.experts.FusedMoEExperts.takes_quantized`).
        reduces: The experts apply the router weights and sum over top-k themselves.
        all2all: Names of supported all-to-all backends; None for all.
        rounds_products: Products are rounded to the dtype before the bias is added. Where the two cancel, more than
            one rounding of the sum is lost.
        rounds_scales: Group scales with more bits than the dtype are rounded to it before the multiplication.
        keeps_nan: A token with a NaN value has a NaN result, and no other token has. The same holds for Inf if
            activation scales are dynamic; a static scale saturates it.
        allocates: A library allocates from torch's allocator on every call.
        requires: Required software.
        verified_on: Hardware on which the conformance kit passed, for all keys or (:class:`Verified`) for some.
            Everything else was at most compiled.
        notes: Remarks for users.
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
        """Whether a custom clamp limit is supported with an activation.

        Args:
            activation: The activation.

        Returns:
            True if it is.
        """
        limited = self.activation_limit
        return limited if isinstance(limited, bool) else activation in limited

    def verified_for(self, weight_key: QuantKey | None, activation_key: QuantKey | None) -> tuple[str, ...]:
        """List the hardware on which a pair of keys was verified.

        Args:
            weight_key: Quantization key of the weights.
            activation_key: Quantization key of the activations.

        Returns:
            Names of the hardware.
        """
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
        """List every reason why the claims do not cover a request.

        Args:
            config: Configuration of the layer.
            weight_key: Quantization key of the weights; None: 16 bits.
            activation_key: Quantization key of the activations; None: 16 bits.
            device: The device.
            environment: Installed software.

        Returns:
            The reasons; empty if the request is covered.
        """
        reasons: list[str] = []
        against = [r.reason_against(device) for r in self.devices]
        if all(reason is not None for reason in against):
            reasons.append(f"needs {' or '.join(map(str, self.devices))}, device is {device}")
        reasons += [r for r in map(environment.reason_against, self.requires) if r is not None]
        reasons += self._key_reasons(weight_key, activation_key)
        if config.batch_invariant and activation_key is not None and activation_key.spans_tokens:
            reasons.append("is not batch invariant with a dynamic scale that all tokens share")
        reasons += self._layer_reasons(config, weight_key)
        return reasons

    def multiples(self, weight_key: QuantKey | None) -> tuple[int, int]:
        """Compute the required divisors of hidden and intermediate size.

        Args:
            weight_key: Quantization key of the weights.

        Returns:
            The two divisors.
        """
        group = self._group(weight_key)
        return math.lcm(self.hidden_multiple, group), math.lcm(self.intermediate_multiple, group)

    def _group(self, weight_key: QuantKey | None) -> int:
        return 1 if weight_key is None or not self.whole_groups else max(weight_key.group_size, 1)

    def takes_keys(self, weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        """Whether a pair of keys is claimed.

        Args:
            weight_key: Quantization key of the weights.
            activation_key: Quantization key of the activations.

        Returns:
            True if it is.
        """
        return any(key_matches(w, weight_key) and key_matches(a, activation_key) for w, a in self.keys)

    def _key_reasons(self, weight_key: QuantKey | None, activation_key: QuantKey | None) -> list[str]:
        if self.takes_keys(weight_key, activation_key):
            return []
        with_weight = [a for w, a in self.keys if key_matches(w, weight_key)]
        if not with_weight:
            return [f"does not read weights quantized as {weight_key or 'nothing (16-bit)'}"]
        offered = "; ".join("16-bit" if a is None else str(a) for a in with_weight)
        return [f"does not take activations quantized as {activation_key or 'nothing (16-bit)'}, takes {offered}"]

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
                reasons.append("is monolithic (it routes itself), but the config has no routing")
            elif method not in self.routing_methods:
                reasons.append(f"does not compute the routing method {method.name}")
        return reasons
