"""Find and check the tensors that accompany a quantized weight, by suffix."""

from __future__ import annotations

from collections.abc import Sequence

from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.matrices import module_name
from moe_core.errors import CheckpointError

#: Suffixes of static activation scales.
INPUT_SCALES = ("input_scale", "activation_scale", "act_scale")
ZERO_POINTS = ("weight_zero_point", "input_zero_point", "zero_point")


def one_suffix(layer: LayerExperts, projection: str, suffixes: Sequence[str]) -> str | None:
    """Return which of several equivalent suffixes a projection has.

    Args:
        layer: The layer's expert tensors.
        projection: One of the layer's projections.
        suffixes: Equivalent suffixes.

    Returns:
        The suffix, or None if the projection has none of them.

    Raises:
        CheckpointError: The projection has more than one of them.
    """
    found = [suffix for suffix in suffixes if layer.has(projection, suffix)]
    if len(found) > 1:
        names = " and ".join(layer.name(0, projection, suffix) for suffix in found)
        raise CheckpointError(f"{names} are both present, expected one of them")
    return found[0] if found else None


def missing(layer: LayerExperts, projection: str, suffix: str) -> str:
    """Return the message for a projection that lacks a tensor.

    Args:
        layer: The layer's expert tensors.
        projection: One of the layer's projections.
        suffix: The missing suffix.

    Returns:
        The message, which names an ignored file that contains the tensor if there is one.
    """
    # Stacked tensors have no separate module: their suffix follows an underscore.
    known = [(layer.name(0, projection, other), other) for other in layer.suffixes(projection)]
    dotted = any(name.endswith(f".{other}") for name, other in known)
    name = f"{module_name(layer, projection)}{'.' if dotted or not layer.stacked_names else '_'}{suffix}"
    return f"{name} is missing in {layer.checkpoint.path}{layer.checkpoint.left_out(name.__eq__)}"


def refuse_zero_points(layer: LayerExperts, projection: str, suffix: str, experts: Sequence[int]) -> None:
    """Refuse zero points other than 0 for symmetric types.

    Tools write zero points of 0 for symmetric types too.

    Args:
        layer: The layer's expert tensors.
        projection: One of the layer's projections.
        suffix: Suffix of the zero points.
        experts: Global ids of the experts.

    Raises:
        CheckpointError: A zero point is not 0.
    """
    for expert in experts:
        if bool(layer.tensor(expert, projection, suffix).float().any()):
            name = layer.name(expert, projection, suffix)
            raise CheckpointError(f"{name} holds values other than 0, expected symmetric weights and activations")


def check_stated_shape(
    layer: LayerExperts, projection: str, size: tuple[int, int], experts: Sequence[int], suffix: str = "weight_shape"
) -> None:
    """Check the stored ``weight_shape`` of each expert.

    Args:
        layer: The layer's expert tensors.
        projection: One of the layer's projections.
        size: [rows, cols] of the unpacked weight.
        experts: Global ids of the experts.
        suffix: Suffix of the tensor that states the shape.

    Raises:
        CheckpointError: A stored shape differs from ``size``.
    """
    # The tensors of one expert are adjacent in the file, so all projections are read together.
    keys = [(one, suffix) for one in sorted(layer.projections) if layer.has(one, suffix)]
    key = (check_stated_shape, suffix, tuple(experts))
    found = layer.once(key, lambda: layer.stacked_together(keys, experts))[projection, suffix]
    for expert, stated in zip(experts, found.flatten(1).tolist(), strict=True):
        if stated != list(size):
            name = layer.name(expert, projection, suffix)
            raise CheckpointError(f"{name} states {stated}, expected {list(size)} as in config.json")
