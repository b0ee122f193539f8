"""Differences that a change of a folder may cause: what any reader must accept, no more.

A modified folder that still loads is correct if it gives the original layer, or differs only in what the changed
entries and tensors mean:

- an entry of a JSON file in :data:`MEANINGS`, if its new value is valid for the entry
- bytes and dtypes of an expert's tensors: that expert's matrix, and the scale of its inputs
- tensors of the router: the router itself
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moe_kit.fuzz.mutations import Files
from moe_kit.fuzz.reading import MISSING, StoredTensor, statements, stored_tensors

Allowed = set[str]


def _none(value: object) -> bool:
    return value is None or value == MISSING


def _flag(value: object) -> bool:
    return _none(value) or isinstance(value, bool)


def _count(value: object) -> bool:
    return _none(value) or (isinstance(value, int) and not isinstance(value, bool))


def _number(value: object) -> bool:
    if isinstance(value, bool):
        return False
    return _none(value) or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _each(values: Callable[[object], bool]) -> Callable[[object], bool]:
    """Accept a value, or one value per layer, of which the first is read."""
    return lambda value: values(value[0] if value else None) if isinstance(value, list) else values(value)


def _name(value: object) -> bool:
    return value is None or isinstance(value, str)


def _one_of(*names: str) -> Callable[[object], bool]:
    return lambda value: value is None or (isinstance(value, str) and value.lower() in (*names, MISSING))


def _exactly(*names: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and value in names


def _names(value: object) -> bool:
    return _none(value) or isinstance(value, (str, list))


def _size(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)


@dataclass(frozen=True)
class Meaning:
    """What an entry may change, and its valid values.

    Attributes:
        parts: Names of facts and values of :class:`Layer`; "routing" for all of the routing, "values" for all weights.
        values: Whether a value is valid.
        within: Component that the entry's path must contain; "" for any path.
    """

    parts: tuple[str, ...]
    values: Callable[[object], bool]
    within: str = ""


_ROUTING = ("routing", "router_bias", "router_correction_bias")
_INPUTS = (
    "activation_key",
    "scheme",
    "w13_input_scale",
    "w2_input_scale",
    "w13_input_zero_point",
    "w2_input_zero_point",
)

#: by the last component of an entry's path
MEANINGS: Mapping[str, tuple[Meaning, ...]] = {
    # entries of the model
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "moe_top_k"),
        (Meaning(("top_k",), _each(_count)),),
    ),
    **dict.fromkeys(("norm_topk_prob", "route_norm", "norm_topk"), (Meaning(_ROUTING, _each(_flag)),)),
    **dict.fromkeys(
        ("routed_scaling_factor", "route_scale", "router_scaling_factor"), (Meaning(("routing",), _each(_number)),)
    ),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group"), (Meaning(_ROUTING, _each(_count)),)),
    **dict.fromkeys(("scoring_func", "score_func", "topk_method"), (Meaning(_ROUTING, _each(_name)),)),
    **dict.fromkeys(("hidden_act", "hidden_activation", "mlp_hidden_act"), (Meaning(("activation",), _each(_name)),)),
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha"), (Meaning(("activation_params",), _each(_number)),)),
    "model_type": (
        # Another known family. In gpt-oss, gate and up rows are interleaved and experts have biases, as in some
        # samples.
        Meaning(
            (*_ROUTING, "activation", "activation_params", "apply_router_weight_on_input", "values", "w13_bias"),
            _exactly("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"),
        ),
    ),
    # compressed-tensors
    "dynamic": (Meaning(_INPUTS, _flag, "input_activations"),),
    "symmetric": (Meaning(_INPUTS, _flag, "input_activations"), Meaning(_INPUTS, _flag, "input_tensors")),
    **dict.fromkeys(("num_bits",), (Meaning(_INPUTS, _count, "input_activations"),)),
    **dict.fromkeys(("type", "strategy", "scale_dtype"), (Meaning(_INPUTS, _name, "input_activations"),)),
    "input_activations": (Meaning(_INPUTS, _one_of()),),
    "targets": (Meaning(_INPUTS, _names, "config_groups"),),
    "group_size": (
        Meaning(_INPUTS, _count, "input_activations"),
        Meaning(_INPUTS, _count, "input_tensors"),
        Meaning(("values",), _count),
    ),
    # GPTQ, AWQ, AutoRound
    "q_group_size": (Meaning(("values",), _count),),
    **dict.fromkeys(("checkpoint_format", "format"), (Meaning(("values",), _one_of("gptq", "gptq_v2")),)),
    "quantizer": (Meaning(("values",), _names),),
    **dict.fromkeys(("act_bits", "act_group_size"), (Meaning(_INPUTS, _count),)),
    **dict.fromkeys(("act_data_type", "data_type"), (Meaning(_INPUTS, _name),)),
    # fp8, ModelOpt, Quark
    "weight_block_size": (Meaning(("values", *_INPUTS), _size),),
    "block_structure": (Meaning(("values",), _size),),
    "activation_scheme": (Meaning(_INPUTS, _one_of("static", "dynamic")),),
    "quant_algo": (Meaning(_INPUTS, _name),),
    **dict.fromkeys(
        ("dtype", "qscheme", "scale_format", "scale_calculation_mode"), (Meaning(_INPUTS, _name, "input_tensors"),)
    ),
    "is_dynamic": (Meaning(_INPUTS, _flag, "input_tensors"),),
    "input_tensors": (Meaning(_INPUTS, _one_of()),),
}

#: synonyms that a tool's settings may hold at their top level, and their maximum depth in a file
SYNONYMS, _TOP = (
    (
        *(("bits", "w_bit"), ("group_size", "q_group_size"), ("checkpoint_format", "format"), ("quant_algo",)),
        *(("activation_scheme",), ("act_bits",), ("act_data_type",), ("data_type",)),
    ),
    2,
)

#: matrices that an expert's tensor name may contain
_EXPERT = re.compile(r".*\.experts\.(\d+)\.(?:(gate_up_proj|gate_proj|up_proj)|(down_proj))\..*", re.DOTALL)
_NUMBERED = re.compile(r".*\.experts\.(gate_up|down)\.(\d+)\..*", re.DOTALL)
_STACKED = re.compile(r".*\.experts\.(?:(gate_up_proj)|(down_proj)).*", re.DOTALL)
_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_MIXTRAL = re.compile(r"\.(w[123])\.")
_ROUTER = ("gate.weight", "router.weight", "router.bias", "e_score_correction_bias")


def allowed_differences(before: Files, after: Files, num_experts: int) -> Allowed:
    """Return the differences that a change may cause.

    Args:
        before: Files of the original folder.
        after: Files of the modified folder.
        num_experts: Number of experts.

    Returns:
        Names as in :meth:`Layer.differences`.
    """
    allowed: Allowed = set()
    contradicted = set(contradictions(after))
    for name in before.keys() | after.keys():
        old, new = before.get(name, b""), after.get(name, b"")
        if old == new:
            continue
        if name.endswith(".safetensors"):
            for tensor, mine, theirs in _changed_tensors(old, new):
                allowed |= set(_of_tensor(tensor, mine, theirs, num_experts))
        else:
            for path, value in changed_entries(old, new):
                if path[:1] == ("weight_map",):
                    # A tensor that the index does not name is removed.
                    allowed |= set(_of_tensor(path[-1], None, None, num_experts))
                if path and path[-1] in contradicted and len(path) <= _TOP:
                    continue
                for meaning in MEANINGS.get(path[-1] if path else "", ()):
                    if (not meaning.within or meaning.within in path) and meaning.values(value):
                        allowed |= set(meaning.parts)
    return allowed


def contradictions(files: Files) -> Iterator[str]:
    """Yield entries with contradictory values in a tool's settings: none of them is valid.

    Args:
        files: Files of the folder.

    Yields:
        Names of the entries.
    """
    by_file = {name: statements(content) or {} for name, content in files.items() if name.endswith(".json")}
    for names in SYNONYMS:
        values = {
            str(value).lower()
            for entries in by_file.values()
            for path, value in entries.items()
            if path and path[-1] in names and len(path) <= _TOP and value is not None
        }
        if len(values) > 1:
            yield from names


def changed_names(before: Files, after: Files) -> list[str]:
    """Return the last path components of changed entries, and "tensors" if tensors differ.

    Args:
        before: Files of the original folder.
        after: Files of the modified folder.

    Returns:
        The names, sorted.
    """
    found: set[str] = set()
    for name in before.keys() | after.keys():
        old, new = before.get(name, b""), after.get(name, b"")
        if old != new and name.endswith(".safetensors"):
            found.add("tensors")
        elif old != new:
            found |= {path[-1] if path else name for path, _ in changed_entries(old, new)}
    return sorted(found)


def unexplained(differences: set[str], allowed: Allowed) -> set[str]:
    """Return the differences that are not allowed.

    Args:
        differences: Names of :meth:`Layer.differences`.
        allowed: Names of :func:`allowed_differences`.

    Returns:
        The remaining differences.
    """

    def explained(name: str) -> bool:
        base = name.partition("[")[0]
        if name in allowed or base in allowed:
            return True
        if base in ("w13", "w2") or base.endswith("_pre_scale"):
            return "values" in allowed
        return base.partition(".")[0] in allowed

    return {name for name in differences if not explained(name)}


def changed_entries(old: bytes, new: bytes) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every entry of a JSON text that another text changes or lacks.

    Args:
        old: The original text.
        new: The modified text.

    Yields:
        (path, new value).
    """
    mine, theirs = statements(old or b"{}") or {}, statements(new or b"{}") or {}
    for path in mine.keys() | theirs.keys():
        value = theirs.get(path, MISSING)
        if path not in mine or type(value) is not type(mine[path]) or value != mine[path]:
            # The entry itself, and its enclosing objects, which may be gone with it.
            yield path, value
            for end in range(1, len(path)):
                if path[:end] in theirs:
                    yield path[:end], theirs[path[:end]]
                elif not any(other[:end] == path[:end] for other in theirs):
                    yield path[:end], MISSING


def _changed_tensors(old: bytes, new: bytes) -> Iterator[tuple[str, StoredTensor | None, StoredTensor | None]]:
    mine, theirs = _by_projection(old), _by_projection(new)
    for name in mine.keys() | theirs.keys():
        if mine.get(name) != theirs.get(name):
            yield name, mine.get(name), theirs.get(name)


def _by_projection(content: bytes) -> dict[str, StoredTensor]:
    """Return tensors by name, in one of the possible namings of a model."""
    found = stored_tensors(content) or {}
    return {_MIXTRAL.sub(lambda m: f".{_PROJECTIONS[m[1]]}.", name): tensor for name, tensor in found.items()}


def _of_tensor(name: str, old: StoredTensor | None, new: StoredTensor | None, num_experts: int) -> Iterator[str]:
    """Yield what a tensor belongs to.

    A removed or added tensor yields nothing, since its loss or presence must be noticed.
    """
    if name.endswith(_ROUTER):
        # An engine may provide the router itself, but tensors that belong to it must not disappear alone.
        if new is not None or name.endswith("weight"):
            yield from ("router_weight", "router_bias", "router_correction_bias")
        return
    if old is None or new is None:
        return
    one, numbered, stacked = (pattern.fullmatch(name) for pattern in (_EXPERT, _NUMBERED, _STACKED))
    if one is not None:
        first, experts = one[2] is not None, [int(one[1])]
    elif numbered is not None:
        first, experts = numbered[1] == "gate_up", [int(numbered[2])]
    elif stacked is not None:
        first, experts = stacked[1] is not None, list(range(num_experts))
    else:
        return
    for expert in experts:
        for suffix in ("", "_bias", "_input_scale", "_input_zero_point", "_pre_scale"):
            yield f"{'w13' if first else 'w2'}{suffix}[{expert}]"
