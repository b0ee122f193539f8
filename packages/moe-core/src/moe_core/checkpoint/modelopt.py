"""What ModelOpt's config says of one layer's experts (``hf_quant_config.json``, ``quantization_config``)."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.matrices import module_name
from moe_core.checkpoint.quant_args import QuantEntries, short
from moe_core.errors import CheckpointError


def is_modelopt(quantization: Mapping[str, Any]) -> bool:
    """Whether ``quant_method`` names ModelOpt ("modelopt", "modelopt_mixed" …)."""
    return str(quantization.get("quant_method", "")).lower().split("_")[0] == "modelopt"


def quant_algo(quantization: Mapping[str, Any], layer: LayerExperts) -> tuple[str, QuantEntries]:
    """(algorithm in capitals, the entries that came with it) of the layer's experts.

    ``MIXED_PRECISION`` is resolved through ``quantized_layers``, whose entries name modules, blocks or patterns.  The
    ``config_groups`` that ModelOpt writes too are not looked at: they call every activation static.
    Raises CheckpointError where nothing is said of the experts, or different things of their projections.
    """
    where = str(layer.checkpoint.path / "config.json")
    entries = QuantEntries(quantization, where)
    named = entries.text("quant_algo")
    if named is None:
        raise entries.error("quant_algo", "an algorithm")
    if named.upper() != "MIXED_PRECISION":
        return named.upper(), entries
    layers = entries.part("quantized_layers")
    if layers is None:
        raise entries.error("quantized_layers", "an object, since quant_algo is MIXED_PRECISION")
    found: dict[str, QuantEntries] = {}
    for projection in sorted(layer.projections):
        module = module_name(layer, projection)
        key = _owner(module, layers.entries)
        part = None if key is None else layers.part(key)
        if key is None or part is None:
            raise CheckpointError(f"{layers.where} names neither {module} nor a part of the model that holds it")
        algorithm = part.text("quant_algo")
        if algorithm is None:
            raise part.error("quant_algo", "an algorithm")
        found.setdefault(algorithm.upper(), part)
    if len(found) > 1:
        raise CheckpointError(
            f"{layers.where}: the experts of {layer.prefix} are quantised by {' and by '.join(sorted(found))}; "
            "all matrices of a layer's experts must be quantised alike"
        )
    return next(iter(found.items()))


def _owner(module: str, layers: Mapping[str, Any]) -> str | None:
    """The entry of ``module`` or of the closest part of the model around it; patterns last."""
    name = module
    while name:
        if name in layers:
            return name
        name = name.rpartition(".")[0]
    return next((key for key in layers if "*" in key and fnmatchcase(module, key)), None)


def unknown_algo(algorithm: str, expected: str) -> str:
    """The reason against an algorithm that a format does not read."""
    return f"quant_algo is {short(algorithm)}, expected {expected}"
