"""Suggest changed requests that a GPU kernel can run, where none runs the original one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from moe_core.errors import ConfigError
from moe_core.interface.claims import expand_key, key_matches
from moe_core.selection.report import Alternative, Candidate, key_name
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import Environment, Requirement
from moe_core.spec.quant_key import QuantKey


@dataclass(frozen=True)
class Request:
    """Inputs of a selection, other than the table of backends.

    Attributes:
        config: Config of the layer.
        weight_key: Quantization of weights; None for 16 bits.
        activation_key: Quantization of activations; None for 16 bits.
        device: Device to select for.
        environment: Installed packages.
    """

    config: FusedMoEConfig
    weight_key: QuantKey | None
    activation_key: QuantKey | None
    device: DeviceInfo
    environment: Environment


#: An alternative whose backend is not known yet, and the changed request.
_Change = tuple[Alternative, Request]


class _Everything(Environment):
    """An environment in which every requirement is installed."""

    def version(self, requirement: Requirement) -> str | None:
        return ""


def alternatives(
    request: Request, candidates: Iterable[Candidate], examine: Callable[[Request], Iterable[Candidate]]
) -> tuple[Alternative, ...]:
    """Return changes of a request under which a GPU kernel fits.

    Single changes are tried first. Pairs of changes are tried only if no single change helps.

    Args:
        request: The original request.
        candidates: Candidates for the original request.
        examine: Function that returns the candidates for a request.

    Returns:
        The changes, each with the backend that then fits.
    """
    activations = _activations(request, candidates)

    def first(changes: Iterable[_Change]) -> list[Alternative]:
        """The first change that helps, in a list; an empty list if none does."""
        for change, changed in changes:
            try:
                found = next((c for c in examine(changed) if c.fits and c.is_kernel), None)
            except ConfigError:  # a request that the scheme does not support
                continue
            if found is not None:
                return [_library(found, request) if not change.change else replace(change, backend=found.backend)]
        return []

    libraries = [(Alternative("", ""), replace(request, environment=_Everything()))]
    layer = _layer(request)
    single = [first(activations), first(libraries), *(first([change]) for change in layer)]
    both = [(_joined(one, two), changed) for one, start in activations for two, changed in _layer(start)]
    return tuple(found for kind in single for found in kind) or tuple(first(both))


def _activations(request: Request, candidates: Iterable[Candidate]) -> list[_Change]:
    """Other activation keys that backends combine with these weights, 16-bit first."""
    keys = dict.fromkeys(
        key
        for candidate in candidates
        if candidate.fault is None
        for weight, activation in candidate.experts.claims.keys
        if key_matches(weight, request.weight_key)
        for key in expand_key(activation)
        # Static ones need scales from the checkpoint.
        if key != request.activation_key and (key is None or not key.is_static)
    )
    changes = []
    for key in sorted(keys, key=lambda key: key is not None):
        name = key_name(key)
        text = "16-bit activations" if name is None else f"activations of {name}"
        argument = "activation_key=None" if name is None else f"activation_key={name!r}"
        command = f"--activation-key {name or 'none'}"
        changes.append((Alternative(text, "", argument, command), replace(request, activation_key=key)))
    return changes


def _layer(request: Request) -> list[_Change]:
    """Layer features that a request could drop."""
    config = request.config
    changes = []
    if config.is_lora_enabled:
        without = replace(config, is_lora_enabled=False)
        changes.append((Alternative("no LoRA adapters", "", "max_loras=0"), replace(request, config=without)))
    if config.batch_invariant:
        without = replace(config, batch_invariant=False)
        changes.append(
            (Alternative("no batch invariance", "", "batch_invariant=False"), replace(request, config=without))
        )
    if config.dtype is not torch.bfloat16:
        in_bfloat16 = replace(config, dtype=torch.bfloat16)
        change = Alternative("hidden states in bfloat16", "", "dtype=torch.bfloat16", "--dtype bfloat16")
        changes.append((change, replace(request, config=in_bfloat16)))
    return changes


def _library(found: Candidate, request: Request) -> Alternative:
    missing = [r for r in found.experts.claims.requires if request.environment.reason_against(r) is not None]
    what = " and ".join(requirement.distribution for requirement in missing)
    return Alternative(what, found.backend, command="; ".join(requirement.hint for requirement in missing))


def _joined(one: Alternative, two: Alternative) -> Alternative:
    def both(first: str, second: str, between: str) -> str:
        return between.join(text for text in (first, second) if text)

    return Alternative(
        both(one.change, two.change, " and "),
        "",
        both(one.argument, two.argument, ", "),
        both(one.command, two.command, " "),
    )
