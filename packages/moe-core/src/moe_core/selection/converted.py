"""Remember the layer of converted weights, so that a kernel rejects those of another layer.

A layout does not show its layer: the rows of a larger layer look just as valid, and would be read to their end. Entries
live as long as the weights.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

from moe_core.errors import ConfigError
from moe_core.selection.report import Selection
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import KernelWeights


class _Layer(NamedTuple):
    """The properties that the conversion of a layer's weights depends on."""

    local_experts: int
    hidden_size: int
    intermediate_size: int
    is_gated: bool
    weight_key: QuantKey | None
    activation_key: QuantKey | None
    arch: str


_LAYERS: WeakKeyDictionary[KernelWeights, _Layer] = WeakKeyDictionary()


def remember(weights: object, selection: Selection) -> None:
    """Record that weights were converted for a selection.

    Other objects that a plug-in may return are ignored; the kernel rejects them.

    Args:
        weights: Result of a conversion.
        selection: Selection that it was made for.
    """
    if isinstance(weights, KernelWeights):
        _LAYERS[weights] = _layer(selection)


def check_converted(weights: object, selection: Selection) -> None:
    """Check that weights were not converted for another layer.

    Weights of unknown origin pass.

    Args:
        weights: Weights to check.
        selection: Selection of the layer.

    Raises:
        ConfigError: The weights were converted for another layer; the message lists the differences.
    """
    layer = _LAYERS.get(weights) if isinstance(weights, KernelWeights) else None
    wanted = _layer(selection)
    if layer is None or layer == wanted:
        return
    differ = [name for name, one, other in zip(_Layer._fields, layer, wanted, strict=True) if one != other]
    raise ConfigError(
        "the weights were converted for another layer than the selected one: "
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
