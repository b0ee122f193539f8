"""Merge the quantization settings of a folder's JSON files and refuse contradictions.

Tools repeat settings: in config.json and in a separate file, at the top level of config.json and in its text section,
and under several names. A setting that is missing in one place is taken from another. Contradictory settings are
refused, because either of them may describe the tensors. The error names both places.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_core._support.strict_json import load_object
from moe_core.checkpoint.config.keys import NESTED
from moe_core.checkpoint.config.quant_args import LONGEST_NAME, QuantEntries, short
from moe_core.errors import CheckpointError

#: config.json entries that hold a tool's settings.
_IN_CONFIG = ("quantization_config", "compression_config")
#: (file next to config.json, entry with the settings or None for the whole file, tool implied by the file or None).
_BESIDE = (
    ("hf_quant_config.json", "quantization", "modelopt"),
    ("quantize_config.json", None, "gptq"),
    ("quant_config.json", None, "awq"),
    ("quantization_config.json", None, None),
)

Entries = Mapping[str, Any]


def _same(value: object) -> object:
    return value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def tool(value: object) -> object:
    """Return the tool of a ``quant_method``, without its variant.

    Variants are, for example, "modelopt_mixed" and "intel/auto-round".

    Args:
        value: Value of ``quant_method``.

    Returns:
        The tool's name in lower case; ``value`` itself if it is not a string.
    """
    name = _lower(value)
    if not isinstance(name, str):
        return name
    return "modelopt" if name.split("_")[0] == "modelopt" else name.removeprefix("intel/")


def _negated(value: object) -> object:
    return not value if isinstance(value, bool) else value


def _stated(value: object) -> object:
    """Remove null and empty entries from JSON: they mean the same as absent ones."""
    if isinstance(value, dict):
        kept = {key: _stated(one) for key, one in value.items()}
        return {key: one for key, one in kept.items() if one is not None and one != {}}
    return [_stated(one) for one in value] if isinstance(value, list) else value


def _packing(value: object) -> object:
    """Return the tensor layout in an AutoRound packing name, without the recommended kernel."""
    name = _lower(value)
    if not isinstance(name, str):
        return name
    name = name.replace("-", "_")
    if name == "auto":
        return None
    return next((kind for kind in ("awq", "gptq", "llm_compressor") if kind in name), name.partition(":")[0])


def quantizers(value: object) -> list[str] | None:
    """Return the tools that wrote a checkpoint according to its ``meta`` entry.

    Args:
        value: Value of ``meta``.

    Returns:
        Sorted names without versions, or None if there are none.
    """
    names = value.get("quantizer") if isinstance(value, dict) else None
    listed = names if isinstance(names, list) else [names]
    return sorted({name.partition(":")[0] for name in listed if isinstance(name, str)}) or None


@dataclass(frozen=True)
class Setting:
    """One setting that may be stated under several names.

    Attributes:
        names: Function that normalizes the value, by name. All stated values must agree once normalized; None means
            that a value states nothing.
        tools: Tools in whose settings the names have this meaning; all if empty.
        but: Tools in whose settings they do not.
    """

    names: Mapping[str, Callable[[object], object]]
    tools: frozenset[str] = field(default=frozenset())
    but: frozenset[str] = field(default=frozenset())

    def holds_for(self, name: object) -> bool:
        """Return whether the names have this meaning in a tool's settings.

        Args:
            name: The tool.

        Returns:
            True if they have.
        """
        return (not self.tools or name in self.tools) and name not in self.but


def _setting(*names: str, means: Callable[[object], object] = _same, tools: Sequence[str] = ()) -> Setting:
    return Setting(dict.fromkeys(names, means), frozenset(tools))


#: Entry with ModelOpt's algorithm for the experts, next to the ``quant_method`` of another tool (DeepSeek-V4).
OF_EXPERTS = "moe_quant_algo"

#: All settings at the top level of a tool's config that some format reads.
SETTINGS = (
    _setting("quant_method", "method", means=tool),
    _setting("bits", "w_bit", "wbits"),
    _setting("group_size", "q_group_size"),
    # Some versions of GPTQModel always write sym=true in AWQ settings; zero_point decides there.
    Setting(
        {"sym": _same, "symmetric": _same, "zero_point": _negated, "has_zero_point": _negated}, but=frozenset({"awq"})
    ),
    _setting("zero_point", "has_zero_point", tools=("awq",)),
    _setting("checkpoint_format", "format", means=_lower, tools=("gptq",)),
    _setting("checkpoint_format", "format", "version", means=_lower, tools=("awq",)),
    _setting("packing_format", "backend", means=_packing, tools=("auto-round",)),
    _setting("meta", means=quantizers),
    *(
        _setting(name, means=_lower)
        for name in (
            *("quant_algo", OF_EXPERTS, "fmt", "scale_fmt", "expert_dtype", "store_dtype"),
            *("activation_scheme", "data_type", "act_data_type"),
            *("checkpoint_format", "format", "packing_format", "pack_dtype"),
        )
    ),
    *(_setting(name) for name in ("desc_act", "is_marlin_format", "autoround_version")),
    *(_setting(name) for name in ("act_bits", "act_group_size", "act_dynamic", "act_sym")),
    *(
        _setting(name, means=_stated)
        for name in (
            *("weight_block_size", "config_groups", "transform_config", "quantized_layers"),
            *("dynamic", "extra_config"),
            *("global_quant_config", "layer_quant_config", "layer_type_quant_config"),
        )
    ),
)

_INTEGERS = ("gptq", "awq", "auto-round")
_SGLANG = ("w8a8_int8", "w8a8_fp8")
#: Entries that only some tools write; together with the name of another tool they are contradictory.
OWNERS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("quant_algo", "quantized_layers"), ("modelopt",)),
    **dict.fromkeys(("global_quant_config", "layer_quant_config", "layer_type_quant_config"), ("quark",)),
    "config_groups": ("compressed-tensors", "modelopt"),
    "weight_block_size": ("fp8", "mxfp8", "auto-round"),
    "activation_scheme": ("fp8", "mxfp8", "auto-round", *_SGLANG),
    **dict.fromkeys(("dynamic", "desc_act", "checkpoint_format"), _INTEGERS),
    # AutoRound also writes these when it exports the formats of other tools.
    **dict.fromkeys(("extra_config", "act_bits", "act_data_type"), (*_INTEGERS, "fp8")),
}
_TOOLS = frozenset(name for names in OWNERS.values() for name in names) | {"mxfp4"}


def read_quantization(folder: Path, config: Entries) -> dict[str, Any]:
    """Merge the quantization settings of a folder's JSON files into one object.

    Args:
        folder: The checkpoint folder.
        config: Content of its config.json.

    Returns:
        The merged settings; empty if there are none.

    Raises:
        CheckpointError: Settings are not a JSON object, or two of them contradict each other.
    """
    found = list(_in_config(config))
    implied: dict[str, Any] = {}
    for name, part, owner in _BESIDE:
        path = folder / name
        # A dangling link to a file that was not downloaded counts as present: its settings must not be ignored.
        if not os.path.lexists(path):
            continue
        content, where = load_object(path), name
        if part is not None:
            content, where = content.get(part, {}), f"{name}: {part}"
        found.append(_statement(where, content))
        if owner is not None:
            implied.setdefault("quant_method", owner)
    merged: dict[str, Any] = {}
    for statement in found:
        stated = {key: value for key, value in statement.entries.items() if value is not None}
        merged = {**statement.entries, **merged, **{k: v for k, v in stated.items() if merged.get(k) is None}}
    if merged.get("quant_method") is None:
        named = merged.get("method")
        merged.update({"quant_method": named} if named is not None else implied)
    method = merged.get("quant_method")
    if method is not None and (not isinstance(method, str) or len(method) > LONGEST_NAME):
        raise CheckpointError(f"{folder / 'config.json'}: quant_method is {short(method)}, expected a name")
    check_statements(folder, found, method)
    return merged


def _in_config(config: Entries, where: str = "config.json: ") -> Iterator[QuantEntries]:
    for key in _IN_CONFIG:
        if config.get(key) is not None:
            yield _statement(f"{where}{key}", config[key])
    for key in NESTED:
        inner = config.get(key)
        if isinstance(inner, dict):
            yield from _in_config(inner, f"{where}{key}.")


def _statement(where: str, content: object) -> QuantEntries:
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} is a {type(content).__name__}, expected an object")
    return QuantEntries(content, where)


def check_statements(folder: Path, found: Sequence[QuantEntries], method: str | None) -> None:
    """Refuse settings that contradict each other.

    Args:
        folder: The checkpoint folder, for messages.
        found: All settings of the folder.
        method: The effective ``quant_method``.

    Raises:
        CheckpointError: Two settings contradict each other; the message names both.
    """
    named = tool(method)
    for setting in SETTINGS:
        if not setting.holds_for(named):
            continue
        first: tuple[str, str, object] | None = None
        for statement in found:
            for name, means in setting.names.items():
                value = statement.entries.get(name)
                meaning = None if value is None else means(value)
                if meaning is None:
                    continue
                text = f"{statement.where}.{name} is {short(value)}"
                if first is None:
                    first = text, type(meaning).__name__, meaning
                elif (type(meaning).__name__, meaning) != first[1:]:
                    raise CheckpointError(
                        f"{folder}: {first[0]}, but {text}: these contradict each other; correct or remove the one "
                        "that does not match the tensors"
                    )
    if named not in _TOOLS:
        return
    # If ModelOpt quantized the experts in another tool's checkpoint, its entries describe the experts.
    known = {named, "modelopt"} if any(s.entries.get(OF_EXPERTS) is not None for s in found) else {named}
    for statement in found:
        for name, owners in OWNERS.items():
            value = statement.entries.get(name)
            if value is not None and known.isdisjoint(owners):
                raise CheckpointError(
                    f"{folder}: {statement.where}.{name} is {short(value)}, an entry of {' or '.join(owners)}, but "
                    f"{_where_named(found)} is {method!r}: these contradict each other, expected entries of one tool"
                )


def _where_named(found: Sequence[QuantEntries]) -> str:
    for statement in found:
        for name in ("quant_method", "method"):
            if statement.entries.get(name) is not None:
                return f"{statement.where}.{name}"
    return "the tool of the file"


def names_method(quant_methods: Sequence[str], method: object) -> bool:
    """Return whether ``quant_methods`` contains a method or the tool it is a variant of.

    Args:
        quant_methods: Names of methods.
        method: The ``quant_method``; "modelopt_mixed" is a variant of "modelopt".

    Returns:
        True if it is contained.
    """
    return method in quant_methods or ("modelopt" in quant_methods and tool(method) == "modelopt")
