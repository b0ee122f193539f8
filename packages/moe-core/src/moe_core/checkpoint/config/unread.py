"""Entries of config.json that change what experts compute, or how they are chosen, and are not understood."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moe_core.checkpoint.config import keys as keys
from moe_core.checkpoint.config.families import Family
from moe_core.checkpoint.config.keys import ConfigKeys

_MARKS = frozenset(
    {"alpha", "beta", "limit", "limits", "clamp", "cap", "softcap", "softcapping", "temperature", "multiplier", "hash"}
)
#: of which a name alone may be an entry of experts: temperatures are those of generation, which transformers writes too
_ALONE = _MARKS - {"temperature"}
_EXPERTS = frozenset({"swiglu", "glu", "mlp", "ffn", "moe", "expert", "experts", "act", "activation", "gate", "up"})
_ROUTER = frozenset({"router", "routing", "route", "hash"})
_ELSEWHERE = frozenset({"shared", "attn", "attention", "final", "lora", "rope", "vision", "aux", "loss"})
_READ = (keys.SWIGLU_LIMIT, keys.SWIGLU_ALPHA, keys.SITU_BETA, keys.SITU_LIMIT, keys.HASH_LAYERS)
_ROUTING = frozenset({*keys.SCORING, *keys.RENORMALIZE, *keys.SCALING})

#: least sums by which weights are divided: what is larger than this changes them
_DIVISION_GUARDS = {"moe_norm_min": 1e-9}


def unread_entries(entries: ConfigKeys, family: Family, *, routing: bool, activation: bool) -> Iterator[str]:
    """Keys of such entries that ``family`` does not read: those of ``routing`` and of ``activation``, where wanted."""
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
    normalised = "norm" in words and bool(words & {"expert", "experts"})
    return normalised or bool(words & _MARKS and words & _EXPERTS)
