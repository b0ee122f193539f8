"""Typed reads of config.json entries under the synonyms that model families use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_core.checkpoint.config.families import REQUIRED
from moe_core.checkpoint.config.quant_args import short
from moe_core.errors import CheckpointError

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "top_k_experts",
)
EXPERT_SIZE = ("moe_intermediate_size", "moe_ffn_hidden_size", "expert_ffn_hidden_size")
DENSE_SIZE = ("intermediate_size", "ffn_hidden_size")
HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
# Nemotron's and Kimi K3's latent experts take a projection of the hidden states; their routers take the hidden states.
LATENT_SIZE = ("moe_latent_size", "routed_expert_hidden_size")
ACTIVATION = ("mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function")
SWIGLU_LIMIT = ("swiglu_limit", "swiglu_limits")
SWIGLU_ALPHA = ("swiglu_alpha",)
SITU_BETA = ("activation_situ_beta",)
SITU_LIMIT = ("activation_situ_linear_beta",)
SCORING = (
    "scoring_func",
    "score_func",
    "score_function",
    "moe_router_score_function",
    "moe_router_activation_func",
    "expert_selection_fn",
)
RENORMALIZE = ("norm_topk_prob", "route_norm", "norm_topk", "moe_renormalize", "norm_expert_weight")
SCALING = (
    "routed_scaling_factor",
    "route_scale",
    "router_scaling_factor",
    "moe_router_topk_scaling_factor",
    "moe_router_scaling_factor",
    "moe_routed_scaling_factor",
)
TOPK_METHOD = ("topk_method",)
GROUPS = ("n_group", "num_expert_group")
TOP_GROUPS = ("topk_group",)
BIAS_SWITCH = ("use_expert_bias", "use_routing_bias", "moe_router_enable_expert_bias")
WEIGHT_ON_INPUT = ("moe_apply_router_weight_on_input",)
HASH_LAYERS = ("num_hash_layers",)
LAYER_KIND = ("mlp_layer_types",)

#: Sections of a multimodal config that may describe the language model.
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")

#: Sections of a layer's entries that describe its experts.
_BLOCK_PARTS = ("ffn", "mlp", "moe")
_LARGEST = 1 << 24


def names_experts(config: Mapping[str, Any]) -> bool:
    """Return whether config.json, or a section of it, states a number of experts.

    Args:
        config: Content of config.json.

    Returns:
        True if the model has experts according to config.json.
    """
    blocks = config.get("block_configs")
    layers = range(len(blocks) if isinstance(blocks, list) else 1)
    if any(_of_layer(config, layer).get(key) for layer in layers for key in NUM_EXPERTS):
        return True
    return any(isinstance(part := config.get(key), dict) and names_experts(part) for key in NESTED)


def model_types(config: Mapping[str, Any]) -> Iterator[Any]:
    """Yield each ``model_type`` of config.json and of its sections for the language model.

    Args:
        config: Content of config.json.

    Yields:
        The values as stored, None where there is none.
    """
    yield config.get("model_type")
    for key in NESTED:
        if isinstance(part := config.get(key), dict):
            yield from model_types(part)


@dataclass(frozen=True)
class ConfigKeys:
    """The config.json entries that describe one layer of the language model.

    Attributes:
        entries: The entries, including those that apply to this layer only.
        file: The file that states them, for messages.
        layer: Index of the layer; entries that are lists hold one value per layer.
        defaults: Values of missing entries, by the first of their names. An entry that is null is not missing.
        types: Each ``model_type`` from the top level down to the section that holds the entries.
    """

    entries: Mapping[str, Any]
    file: Path
    layer: int
    defaults: Mapping[str, object] = field(default_factory=dict)
    types: tuple[Any, ...] = ()

    @staticmethod
    def of(config: Mapping[str, Any], file: Path, layer: int, stack: str = "") -> ConfigKeys:
        """Select the section of config.json that states the number of experts.

        The top level is used if no section does.

        Args:
            config: Content of config.json.
            file: Its path, for messages.
            layer: Index of the layer.
            stack: First component of the layers' tensor names ("thinker"), after which a section may be named.

        Returns:
            The entries of the section as they apply to the layer.
        """
        holders: list[Mapping[str, Any]] = [config]
        own = config.get(f"{stack}_config")
        if isinstance(own, dict):
            holders.append(own)
        while not any(key in _of_layer(holders[-1], layer) for key in NUM_EXPERTS):
            inner = next((holders[-1][key] for key in NESTED if isinstance(holders[-1].get(key), dict)), None)
            if inner is None:
                return ConfigKeys(_of_layer(config, layer), file, layer, types=_types([config]))
            holders.append(inner)
        return ConfigKeys(_of_layer(holders[-1], layer), file, layer, types=_types(holders))

    def with_defaults(self, defaults: Mapping[str, object]) -> ConfigKeys:
        """Return the same entries with other defaults.

        Args:
            defaults: Values of missing entries, by the first of their names.

        Returns:
            The entries with exactly these defaults.
        """
        return replace(self, defaults=defaults)

    @property
    def model_type(self) -> str:
        """The innermost ``model_type``, or "" if the file has none.

        Raises:
            CheckpointError: A ``model_type`` is not a string.
        """
        for value in self.types:
            if not isinstance(value, str):
                raise self.error(f"model_type is {short(value)}, expected a name")
        return self.types[-1] if self.types else ""

    def stated(self, names: Sequence[str]) -> tuple[str, Any] | None:
        """Return the stated value of an entry, ignoring defaults.

        Args:
            names: Synonyms of the entry.

        Returns:
            (key, value) of the first name with a value other than null, or None.

        Raises:
            CheckpointError: Two of the names have different values.
        """
        found = [(name, value) for name in names if (value := self._value(name)) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise self.error(f"{found[0][0]} is {short(found[0][1])}, but {name} is {short(value)}")
        return found[0] if found else None

    def find(self, names: Sequence[str]) -> tuple[str, Any] | None:
        """Return the stated value of an entry, or its default if the entry is missing.

        Args:
            names: Synonyms of the entry; defaults are listed under the first.

        Returns:
            (key, value), or None if there is neither a value nor a default.

        Raises:
            CheckpointError: A required entry is missing, or two of the names have different values.
        """
        found = self.stated(names)
        default = self.defaults.get(names[0])
        if found is not None or default is None or any(name in self.entries for name in names):
            return found
        if default is REQUIRED:
            raise self.error(f"has no {' or '.join(names)}, which models of type {self.model_type} need")
        return names[0], default

    def integer(self, names: Sequence[str]) -> tuple[str, int]:
        """Return (key, value) of a required positive integer.

        Args:
            names: Synonyms of the entry.

        Returns:
            The name in use and its value.

        Raises:
            CheckpointError: The entry is missing or not a positive integer.
        """
        found = self.find(names)
        if found is None:
            raise self.error(f"has no {' or '.join(names)}")
        key, value = found
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise self.error(f"{key} is {short(value)}, expected a positive integer")
        return key, value

    def optional_integer(self, names: Sequence[str]) -> int | None:
        """Return the positive integer under any of ``names``, or None if there is none.

        Args:
            names: Synonyms of the entry.

        Returns:
            The value, or None.

        Raises:
            CheckpointError: The value is not a positive integer.
        """
        return None if self.find(names) is None else self.integer(names)[1]

    def number(self, names: Sequence[str]) -> float | None:
        """Return the number under any of ``names``, or None if there is none.

        Args:
            names: Synonyms of the entry.

        Returns:
            The value, or None.

        Raises:
            CheckpointError: The value is not a finite number.
        """
        value = self._typed(names, "a number", _is_number)
        return None if value is None else float(value)

    def boolean(self, names: Sequence[str]) -> bool | None:
        """Return the boolean under any of ``names``, or None if there is none.

        Args:
            names: Synonyms of the entry.

        Returns:
            The value, or None.

        Raises:
            CheckpointError: The value is not a boolean.
        """
        found: bool | None = self._typed(names, "true or false", lambda value: isinstance(value, bool))
        return found

    def text(self, names: Sequence[str]) -> str | None:
        """Return the string under any of ``names``, or None if there is none.

        Args:
            names: Synonyms of the entry.

        Returns:
            The value, or None.

        Raises:
            CheckpointError: The value is not a string.
        """
        found: str | None = self._typed(names, "a name", lambda value: isinstance(value, str))
        return found

    def _typed(self, names: Sequence[str], expected: str, valid: Callable[[Any], bool]) -> Any:
        """Return the value under any of ``names``, or None; raise CheckpointError unless it is ``valid``."""
        key, value = self.find(names) or (names[0], None)
        if value is not None and not valid(value):
            raise self.error(f"{key} is {short(value)}, expected {expected}")
        return value

    def error(self, what: str) -> CheckpointError:
        """Return an error whose message starts with the file.

        Args:
            what: What is wrong.

        Returns:
            The error to raise.
        """
        return CheckpointError(f"{self.file}: {what}")

    def _value(self, name: str) -> Any:
        value = self.entries.get(name)
        if isinstance(value, list):
            return value[self.layer] if self.layer < len(value) else None
        return value


def _is_number(value: Any) -> bool:
    """Return whether a JSON value is a finite number."""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _of_layer(entries: Mapping[str, Any], layer: int) -> Mapping[str, Any]:
    """Merge the entries that apply to one layer only into ``entries``.

    They come from transformers' ``per_layer_config``, else from ``block_configs``. The latter is a list of all layers
    (Nemotron Puzzle), in which the experts may have a separate object.
    """
    by_name, blocks = entries.get("per_layer_config"), entries.get("block_configs")
    here = by_name.get(str(layer)) if isinstance(by_name, dict) else None
    if here is None and isinstance(blocks, list) and layer < len(blocks):
        here = blocks[layer]
    merged = dict(entries)
    while isinstance(here, dict):
        merged.update(here)
        here = next((here[name] for name in _BLOCK_PARTS if isinstance(here.get(name), dict)), None)
    return merged


def _types(holders: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    return tuple(holder["model_type"] for holder in holders if "model_type" in holder)
