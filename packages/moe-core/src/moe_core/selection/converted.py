"""What weights in a backend's layout were converted for: remembered while they live, so that a kernel takes no others.

A layout does not show for which layer it is: rows of a larger one lie as well, and are read to their end.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

from moe_core.errors import ConfigError
from moe_core.selection.report import Selection
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import KernelWeights


class _Layer(NamedTuple):
    """What the conversion of a layer's weights depends on."""

    local_experts: int
    hidden_size: int
    intermediate_size: int
    is_gated: bool
    weight_key: QuantKey | None
    activation_key: QuantKey | None
    arch: str


_LAYERS: WeakKeyDictionary[KernelWeights, _Layer] = WeakKeyDictionary()


def remember(weights: object, selection: Selection) -> None:
    """``weights`` were converted for ``selection``.  What a plug-in returns instead is the kernel's to refuse."""
    if isinstance(weights, KernelWeights):
        _LAYERS[weights] = _layer(selection)


def check_converted(weights: object, selection: Selection) -> None:
    """ConfigError where it is known that ``weights`` were converted for another layer than ``selection`` is of."""
    layer = _LAYERS.get(weights) if isinstance(weights, KernelWeights) else None
    wanted = _layer(selection)
    if layer is None or layer == wanted:
        return
    differ = [name for name, one, other in zip(_Layer._fields, layer, wanted, strict=True) if one != other]
    raise ConfigError(
        "the weights were converted for another layer than the selection is of: "
        + ", ".join(f"{name} {getattr(layer, name)}, selected {getattr(wanted, name)}" for name in differ)
    )


def _layer(selection: Selection) -> _Layer:
    config = selection.config
    return _Layer(
        config.local_experts,
        config.hidden_size,
        config.intermediate_size,
        config.is_gated,
        selection.weight_key,
        selection.activation_key,
        selection.device.arch,
    )
