"""What belongs to a quantised weight, found by the last part of its name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.errors import CheckpointError

#: the static activations' scale
INPUT_SCALES = ("input_scale", "activation_scale", "act_scale")
ZERO_POINTS = ("weight_zero_point", "input_zero_point", "zero_point")


def one_suffix(layer: LayerExperts, projection: str, suffixes: Sequence[str]) -> str | None:
    """The one of ``suffixes`` that the projection has, None where it has none; CheckpointError where it has two."""
    found = [suffix for suffix in suffixes if layer.has(projection, suffix)]
    if len(found) > 1:
        names = " and ".join(layer.name(0, projection, suffix) for suffix in found)
        raise CheckpointError(f"{names} are both there, expected one of them")
    return found[0] if found else None


def missing(layer: LayerExperts, projection: str, suffix: str, *, weight: str = "weight") -> str:
    """What to say where the projection lacks ``suffix``; ``weight``: the suffix that it does have."""
    name = f"{layer.name(0, projection, weight).removesuffix(f'.{weight}')}.{suffix}"
    return missing_tensor(layer, name)


def missing_tensor(layer: LayerExperts, name: str) -> str:
    """What to say of a tensor of the layer that is not there: where it was looked for, and where it is instead."""
    checkpoint = layer.checkpoint
    return f"{name} is missing in {checkpoint.path}{checkpoint.left_out(name.__eq__)}"


def refuse_zero_points(layer: LayerExperts, projection: str, suffix: str, experts: Sequence[int]) -> None:
    """CheckpointError for zero points other than 0, where symmetric values are expected.

    Tools write zeros for symmetric types too.
    """
    for expert in experts:
        if bool(layer.tensor(expert, projection, suffix).float().any()):
            name = layer.name(expert, projection, suffix)
            raise CheckpointError(f"{name} holds values other than 0, expected symmetric weights and activations")


def check_stated_shape(
    layer: LayerExperts, projection: str, size: tuple[int, int], experts: Sequence[int], suffix: str = "weight_shape"
) -> None:
    """CheckpointError for a ``weight_shape`` that is not ``size``, [rows, cols] of the unpacked weight."""
    # one expert's lie side by side, those of all projections are read together
    keys = [(one, suffix) for one in sorted(layer.projections) if layer.has(one, suffix)]
    key = (check_stated_shape, suffix, tuple(experts))
    found = layer.once(key, lambda: layer.stacked_together(keys, experts))[projection, suffix]
    for expert, stated in zip(experts, found.flatten(1).tolist(), strict=True):
        if stated != list(size):
            name = layer.name(expert, projection, suffix)
            raise CheckpointError(f"{name} says {stated}, expected {list(size)} as config.json has it")


def refuse_mixed(
    layer: LayerExperts, projection: str, plain: Sequence[torch.dtype], quantised: Sequence[torch.dtype]
) -> None:
    """CheckpointError for a projection in ``plain`` where another one is quantised.

    Tools leave matrices alone whose sizes don't fit their groups.
    """
    if not layer.has(projection, "weight") or layer.dtype(projection, "weight") not in plain:
        return
    for other in sorted(layer.projections):
        if layer.has(other, "weight") and layer.dtype(other, "weight") in quantised:
            found, expected = (str(layer.dtype(p, "weight")).removeprefix("torch.") for p in (projection, other))
            raise CheckpointError(
                f"{layer.name(0, projection, 'weight')} has dtype {found}, expected {expected} as "
                f"{layer.name(0, other, 'weight')}: all matrices of a layer's experts must be quantised alike"
            )
