"""Find and check the tensors that accompany a quantized weight, by suffix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_core.checkpoint.experts.layer_experts import LayerExperts
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
        raise CheckpointError(f"{names} are both there, expected one of them")
    return found[0] if found else None


def missing(layer: LayerExperts, projection: str, suffix: str, *, weight: str = "weight") -> str:
    """Return the message for a projection that lacks a tensor.

    Args:
        layer: The layer's expert tensors.
        projection: One of the layer's projections.
        suffix: The missing suffix.
        weight: A suffix that the projection has.

    Returns:
        The message.
    """
    name = f"{layer.name(0, projection, weight).removesuffix(f'.{weight}')}.{suffix}"
    return missing_tensor(layer, name)


def missing_tensor(layer: LayerExperts, name: str) -> str:
    """Return the message for a missing tensor.

    Args:
        layer: The layer's expert tensors.
        name: Name of the tensor.

    Returns:
        The message, which names an ignored file that contains the tensor if there is one.
    """
    checkpoint = layer.checkpoint
    return f"{name} is missing in {checkpoint.path}{checkpoint.left_out(name.__eq__)}"


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
            raise CheckpointError(f"{name} says {stated}, expected {list(size)} as config.json has it")


def refuse_mixed(
    layer: LayerExperts, projection: str, plain: Sequence[torch.dtype], quantized: Sequence[torch.dtype]
) -> None:
    """Refuse layers in which one projection is quantized and another is not.

    Tools leave matrices unquantized if their sizes are not divisible into groups.

    Args:
        layer: The layer's expert tensors.
        projection: The projection to check.
        plain: dtypes of unquantized weights.
        quantized: dtypes of quantized weights.

    Raises:
        CheckpointError: ``projection`` is unquantized and another projection is quantized.
    """
    if not layer.has(projection, "weight") or layer.dtype(projection, "weight") not in plain:
        return
    for other in sorted(layer.projections):
        if layer.has(other, "weight") and layer.dtype(other, "weight") in quantized:
            found, expected = (str(layer.dtype(p, "weight")).removeprefix("torch.") for p in (projection, other))
            raise CheckpointError(
                f"{layer.name(0, projection, 'weight')} has dtype {found}, expected {expected} as "
                f"{layer.name(0, other, 'weight')}: all matrices of a layer's experts must be quantized alike"
            )
