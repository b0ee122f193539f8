"""What Quark's ``quantization_config`` says of one layer's experts."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.matrices import module_name
from moe_core.checkpoint.quant_args import QuantEntries
from moe_core.errors import CheckpointError


def quark_layer(quantization: Mapping[str, Any], layer: LayerExperts) -> QuantEntries:
    """The entries (``weight``, ``input_tensors`` …) that hold for the experts' linear modules.

    ``layer_quant_config`` goes by name or pattern and wins over ``layer_type_quant_config`` (by class) and
    ``global_quant_config``.  ``exclude`` is not looked at: Quark leaves experts out without saying so, therefore the
    tensors tell whether a layer is quantised.
    """
    entries = QuantEntries(quantization, f"{layer.checkpoint.path / 'config.json'}: quantization_config")
    found: dict[str, QuantEntries] = {}
    for projection in sorted(layer.projections):
        part = _of_module(entries, module_name(layer, projection))
        found.setdefault(repr(part.entries), part)
    if len(found) > 1:
        places = " and ".join(part.where for part in found.values())
        raise CheckpointError(
            f"the projections of {layer.prefix} are quantised differently ({places}); "
            "all matrices of a layer's experts must be quantised alike"
        )
    return next(iter(found.values()))


def _of_module(entries: QuantEntries, module: str) -> QuantEntries:
    by_name, by_type = entries.part("layer_quant_config"), entries.part("layer_type_quant_config")
    if by_name is not None:
        for key in by_name.entries:
            if key == module or fnmatchcase(module, key) or module.startswith(f"{key}."):
                part = by_name.part(key)
                if part is not None:
                    return part
    if by_type is not None:
        for key in by_type.entries:
            if key.rpartition(".")[2].removesuffix("'>") == "Linear":
                part = by_type.part(key)
                if part is not None:
                    return part
    part = entries.part("global_quant_config")
    if part is None:
        raise entries.error("global_quant_config", "an object")
    return part
