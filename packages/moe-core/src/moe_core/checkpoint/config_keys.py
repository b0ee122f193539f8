"""Typed reads from config.json, under the names that model families use for the same thing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_core.errors import CheckpointError

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "moe_top_k")
EXPERT_SIZE = ("moe_intermediate_size", "moe_ffn_hidden_size", "expert_ffn_hidden_size")
DENSE_SIZE = ("intermediate_size", "ffn_hidden_size")
HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
ACTIVATION = ("mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function")
SCORING = ("scoring_func", "score_func", "score_function", "moe_router_score_function")
RENORMALIZE = ("norm_topk_prob", "route_norm", "norm_topk")
SCALING = ("routed_scaling_factor", "route_scale", "router_scaling_factor", "moe_router_topk_scaling_factor")
GROUPS = ("n_group", "num_expert_group")
TOP_GROUPS = ("topk_group",)

#: parts of a multi-modal config that may describe the language model
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")

_LARGEST = 1 << 24


@dataclass(frozen=True)
class ConfigKeys:
    """The entries that describe the language model, and the file that they are from.

    ``layer``: entries that are a list hold one value for each layer.
    """

    entries: Mapping[str, Any]
    file: Path
    layer: int

    @staticmethod
    def of(config: Mapping[str, Any], file: Path, layer: int) -> ConfigKeys:
        """The part of ``config`` that names experts; the whole where none does."""
        holder: Mapping[str, Any] = config
        while not any(key in holder for key in NUM_EXPERTS):
            inner = next((holder[key] for key in NESTED if isinstance(holder.get(key), dict)), None)
            if inner is None:
                return ConfigKeys(config, file, layer)
            holder = inner
        return ConfigKeys(holder, file, layer)

    @property
    def model_type(self) -> str:
        value = self.entries.get("model_type", "")
        return value if isinstance(value, str) else ""

    def find(self, names: Sequence[str]) -> tuple[str, Any] | None:
        """(key, value) of the first name that has a value; CheckpointError where two contradict each other."""
        found = [(name, value) for name in names if (value := self._value(name)) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise self.error(f"{found[0][0]} is {_short(found[0][1])}, but {name} is {_short(value)}")
        return found[0] if found else None

    def integer(self, names: Sequence[str]) -> tuple[str, int]:
        """(key, value) of a positive integer; CheckpointError where it is missing or something else."""
        found = self.find(names)
        if found is None:
            raise self.error(f"has no {' or '.join(names)}")
        key, value = found
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise self.error(f"{key} is {_short(value)}, expected a positive integer")
        return key, value

    def optional_integer(self, names: Sequence[str]) -> int | None:
        return None if self.find(names) is None else self.integer(names)[1]

    def number(self, names: Sequence[str], default: float | None) -> float | None:
        """A finite number."""
        found = self.find(names)
        if found is None:
            return default
        key, value = found
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(f"{key} is {_short(value)}, expected a number")
        return float(value)

    def boolean(self, names: Sequence[str]) -> bool | None:
        found = self.find(names)
        if found is None:
            return None
        key, value = found
        if not isinstance(value, bool):
            raise self.error(f"{key} is {_short(value)}, expected true or false")
        return value

    def text(self, names: Sequence[str]) -> str | None:
        found = self.find(names)
        if found is None:
            return None
        key, value = found
        if not isinstance(value, str):
            raise self.error(f"{key} is {_short(value)}, expected a name")
        return value

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {what}")

    def _value(self, name: str) -> Any:
        value = self.entries.get(name)
        if isinstance(value, list):
            return value[self.layer] if self.layer < len(value) else None
        return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
