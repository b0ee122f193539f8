"""What Quark's ``quantization_config`` says of one layer's experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.matrices import expert_modules
from moe_core.checkpoint.patterns import NamePatterns
from moe_core.checkpoint.quant_args import QuantEntries
from moe_core.errors import CheckpointError


def quark_layer(quantization: Mapping[str, Any], layer: LayerExperts) -> QuantEntries:
    """The entries (``weight``, ``input_tensors`` …) that hold for the experts' linear modules.

    ``layer_quant_config`` goes by name or pattern and wins over ``layer_type_quant_config`` (by class) and
    ``global_quant_config``.  ``exclude`` is not looked at: Quark leaves experts out without saying so, therefore the
    tensors tell whether a layer is quantised.
    """
    entries = QuantEntries(quantization, f"{layer.checkpoint.path / 'config.json'}: quantization_config")
    found: dict[int, QuantEntries] = {}
    choose = _chooser(entries)
    for _, _, module in expert_modules(layer):
        part = choose(module)
        found.setdefault(id(part.entries), part)
    first, *others = found.values()
    for other in others:
        if other.entries != first.entries:
            raise CheckpointError(
                f"the experts of {layer.prefix} are quantised differently ({first.where} and {other.where}); "
                "all matrices of a layer's experts must be quantised alike"
            )
    return first


def _chooser(entries: QuantEntries) -> Callable[[str], QuantEntries]:
    """A function: module's name -> the entries that hold for it."""
    by_name, by_type = entries.part("layer_quant_config"), entries.part("layer_type_quant_config")
    kept = NamePatterns()
    patterns = []
    if by_name is not None:
        patterns = [(key, kept.wildcard(key, f"{by_name.where}: the key")) for key in by_name.entries]
    by_class = None
    for key in by_type.entries if by_type is not None else ():
        if by_type is not None and key.rpartition(".")[2].removesuffix("'>") == "Linear":
            by_class = by_class or by_type.part(key)

    def choose(module: str) -> QuantEntries:
        for key, pattern in patterns:
            if by_name is not None and (key == module or module.startswith(f"{key}.") or pattern.match(module)):
                part = by_name.part(key)
                if part is not None:
                    return part
        part = by_class or entries.part("global_quant_config")
        if part is None:
            raise entries.error("global_quant_config", "an object")
        return part

    return choose
