"""Experts modules of a model's MoE blocks, as transformers builds them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from moe_core import ConfigError, FusedMoEConfig
from moe_core.api.models import predicts_ahead
from torch import nn

from moe_transformers.activation import computes

#: submodules of an experts module that a layer of moe-core covers
_KNOWN_PARTS = ("act_fn",)
#: attributes that hold soft caps (modules or numbers) of the activation's inputs
_SOFT_CAPS = ("gate_softcap", "up_softcap")


@dataclass(frozen=True)
class Block:
    """Location of experts in a model.

    Attributes:
        name: name of the experts module ("model.layers.3.mlp.experts").
        module: the experts module.
        index: layer index, as in the checkpoint's tensor names.
    """

    name: str
    module: nn.Module
    index: int

    def check(self, config: FusedMoEConfig) -> None:
        """Check that the module computes the same as a layer of ``config``.

        Args:
            config: configuration of a layer of moe-core.

        Raises:
            ConfigError: the module computes something else.
        """
        kind, module = type(self.module).__name__, self.module
        refuse_parts(module, self.name)
        weights = sum(tensor.numel() for name, tensor in module.named_parameters() if "bias" not in name)
        size = config.hidden_size * config.intermediate_size * (3 if config.is_gated else 2)
        if weights != config.num_experts * size:
            raise ConfigError(
                f"{self.name} ({kind}) has {weights} weights, but the checkpoint's config.json describes "
                f"{config.num_experts} experts of {size}: load the model with the checkpoint's own config"
            )
        if not computes(module, self.name, config.activation, config.activation_params):
            given = f" with {config.activation_params}" if config.activation_params is not None else ""
            raise ConfigError(
                f"{self.name} ({kind}) does not compute {config.activation.value}{given}, which the checkpoint's "
                "config.json describes: load the model with the checkpoint's own config"
            )


def refuse_parts(module: nn.Module, name: str) -> None:
    """Refuse experts that compute more than projections and an activation.

    Args:
        module: experts module of transformers.
        name: name of the module, for errors.

    Raises:
        ConfigError: names the extra parts.
    """
    holders = (module, getattr(module, "act_fn", None))
    parts = [cap for cap in _SOFT_CAPS if any(getattr(holder, cap, None) is not None for holder in holders)]
    parts += [part for part, _ in module.named_children() if part not in (*_KNOWN_PARTS, *parts)]
    if getattr(module, "has_post_expert_norm", False) or parts:
        what = ", ".join(parts) or "a norm after each expert"
        kind = type(module).__name__
        raise ConfigError(f"{name} ({kind}) computes with {what}, which moe-core does not support")


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of all experts modules that take the router's choice as arguments.

    transformers marks their classes (``use_experts_implementation``).

    Args:
        model: model of transformers.
    """
    for name, module in model.named_modules():
        if isinstance(getattr(module, "is_transposed", None), bool) and hasattr(module, "has_gate"):
            yield name, module


def blocks(model: nn.Module) -> Iterator[Block]:
    """Yield the experts of all numbered layers, without those that predict further tokens.

    Args:
        model: model of transformers.
    """
    for name, module in experts_modules(model):
        numbers = re.findall(r"\.(\d+)(?=\.)", f".{name}")
        if numbers and not predicts_ahead(name):
            yield Block(name, module, int(numbers[-1]))
