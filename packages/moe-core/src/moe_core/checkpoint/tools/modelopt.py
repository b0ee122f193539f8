"""Interpret ModelOpt's config for one layer's experts.

The config is ``hf_quant_config.json`` or ``quantization_config`` in config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from moe_core.checkpoint.config.patterns import NamePatterns
from moe_core.checkpoint.config.quant_args import QuantEntries, one_of, short
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.matrices import expert_modules
from moe_core.checkpoint.tools.namings import under_any_name
from moe_core.errors import CheckpointError


def is_modelopt(quantization: Mapping[str, Any]) -> bool:
    """Return whether ``quant_method`` names ModelOpt ("modelopt", "modelopt_mixed" …).

    Args:
        quantization: Quantization settings of the checkpoint.

    Returns:
        True if it does.
    """
    return str(quantization.get("quant_method", "")).lower().split("_")[0] == "modelopt"


def quant_algo(quantization: Mapping[str, Any], layer: LayerExperts) -> tuple[str, QuantEntries]:
    """Find the quantization algorithm of the layer's experts.

    ``MIXED_PRECISION`` is resolved through ``quantized_layers``, whose keys are modules, blocks or patterns. ModelOpt
    also writes ``config_groups``; they are not read, because they declare every activation static.

    Args:
        quantization: Quantization settings of the checkpoint.
        layer: The layer's expert tensors.

    Returns:
        (algorithm in upper case, the object that states it).

    Raises:
        CheckpointError: No algorithm is stated for the experts, or projections have different ones.
    """
    return layer.understood(quantization, _quant_algo)


def _quant_algo(quantization: Mapping[str, Any], layer: LayerExperts) -> tuple[str, QuantEntries]:
    where = str(layer.checkpoint.path / "config.json")
    entries = QuantEntries(quantization, where)
    named = entries.text("quant_algo")
    if named is None:
        raise entries.error("quant_algo", "an algorithm")
    layers = entries.part("quantized_layers")
    if named.upper() != "MIXED_PRECISION":
        _refuse_other(named.upper(), entries, layers, layer)
        return named.upper(), entries
    if layers is None:
        raise entries.error("quantized_layers", "an object, since quant_algo is MIXED_PRECISION")
    found: dict[str, QuantEntries] = {}
    owner = _owners(layers, layer)
    for _, _, module in expert_modules(layer):
        key = owner(module)
        part = None if key is None else layers.part(key)
        if key is None or part is None:
            raise CheckpointError(f"{layers.where} has no entry for {module} or a module that contains it")
        algorithm = part.text("quant_algo")
        if algorithm is None:
            raise part.error("quant_algo", "an algorithm")
        found.setdefault(algorithm.upper(), part)
    if len(found) > 1:
        raise CheckpointError(
            f"{layers.where}: the experts of {layer.prefix} are quantized by {' and by '.join(sorted(found))}; "
            "all matrices of a layer's experts must be quantized alike"
        )
    return next(iter(found.items()))


def _refuse_other(named: str, entries: QuantEntries, layers: QuantEntries | None, layer: LayerExperts) -> None:
    """Refuse ``quantized_layers`` that contradict ``quant_algo`` for the experts."""
    if layers is None:
        return
    owner = _owners(layers, layer)
    for _, _, module in expert_modules(layer):
        key = owner(module)
        part = None if key is None else layers.part(key)
        algorithm = None if part is None else part.text("quant_algo")
        if part is not None and algorithm is not None and algorithm.upper() != named:
            raise CheckpointError(
                f"{entries.where}: quant_algo is {named}, but {part.where}.quant_algo is {algorithm!r} for {module}: "
                "these contradict each other, expected the same or MIXED_PRECISION"
            )


def _owners(layers: QuantEntries, layer: LayerExperts) -> Callable[[str], str | None]:
    """Return a function that maps a module's name to its key in ``layers``.

    The key is the module's name, else that of the innermost enclosing module, else a matching pattern. If no key
    matches the name in the file, the module's names in other namings of the model are tried.
    """
    kept = NamePatterns()
    patterns = [(key, kept.wildcard(key, f"{layers.where}: the key")) for key in layers.entries if "*" in key]

    def choose(module: str) -> str | None:
        name = module
        while name:
            if name in layers.entries:
                return name
            name = name.rpartition(".")[0]
        return next((key for key, pattern in patterns if pattern.match(module)), None)

    return under_any_name(choose, layer)


def unknown_algo(algorithm: str, known: Collection[str]) -> str:
    """Return the reason why a format does not read an algorithm.

    Args:
        algorithm: The algorithm found.
        known: Algorithms that the format reads.

    Returns:
        The reason as one clause.
    """
    return f"quant_algo is {short(algorithm)}, expected {one_of(tuple(known))}"
