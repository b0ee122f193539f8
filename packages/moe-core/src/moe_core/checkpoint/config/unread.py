"""Find unsupported config.json entries that may change routing or experts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moe_core.checkpoint.config import keys as keys
from moe_core.checkpoint.config.families import Family
from moe_core.checkpoint.config.keys import ConfigKeys

_MARKS = frozenset(
    {"alpha", "beta", "limit", "limits", "clamp", "cap", "softcap", "softcapping", "temperature", "multiplier", "hash"}
)
#: Names that may describe experts on their own. A plain "temperature" is a generation setting of transformers.
_ALONE = _MARKS - {"temperature"}
_EXPERTS = frozenset({"swiglu", "glu", "mlp", "ffn", "moe", "expert", "experts", "act", "activation", "gate", "up"})
_ROUTER = frozenset({"router", "routing", "route", "hash"})
_ELSEWHERE = frozenset({"shared", "attn", "attention", "final", "lora", "rope", "vision", "aux", "loss"})
_READ = (keys.SWIGLU_LIMIT, keys.SWIGLU_ALPHA, keys.SITU_BETA, keys.SITU_LIMIT, keys.HASH_LAYERS)
_ROUTING = frozenset({*keys.SCORING, *keys.RENORMALIZE, *keys.SCALING})

#: Lower bounds on the sum that router weights are divided by; values above these limits change the weights.
_DIVISION_GUARDS = {"moe_norm_min": 1e-9}


def unread_entries(entries: ConfigKeys, family: Family, *, routing: bool, activation: bool) -> Iterator[str]:
    """Find entries about routing or activation that the family's code does not read.

    Args:
        entries: config.json entries of the layer.
        family: The model family.
        routing: Whether to report entries about routing.
        activation: Whether to report entries about the activation.

    Yields:
        Keys of such entries.
    """
    read = {name for names in _READ if names[0] in family.reads for name in names} | family.outside | _ROUTING
    for key, value in entries.entries.items():
        words = frozenset(re.split(r"[_\W]+", key.lower()))
        if key in read or words & _ELSEWHERE or value in (None, False, 0, "", "none", [], {}):
            continue
        guard = _DIVISION_GUARDS.get(key)
        if guard is not None:
            if routing and not (isinstance(value, (int, float)) and value <= guard):
                yield key
        elif words & _ROUTER:
            if routing and words & _MARKS:
                yield key
        elif activation and (_changes_experts(words) or key in _ALONE):
            yield key


def _changes_experts(words: frozenset[str]) -> bool:
    normalized = "norm" in words and bool(words & {"expert", "experts"})
    return normalized or bool(words & _MARKS and words & _EXPERTS)
