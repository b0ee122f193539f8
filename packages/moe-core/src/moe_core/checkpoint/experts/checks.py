"""Check shapes and dtypes of a layer's expert tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.errors import CheckpointError


def check_expert_tensor(
    layer: LayerExperts,
    projection: str,
    suffix: str,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    why: str = "",
    *,
    also: Sequence[Sequence[int]] = (),
) -> None:
    """Check the shape and dtype of a projection's tensors, which are the same for every expert.

    Args:
        layer: The layer's expert tensors.
        projection: "gate", "up", "gate_up" or "down".
        suffix: Suffix of the tensors' names.
        shape: Expected shape of one expert's tensor.
        dtypes: Accepted dtypes.
        why: Reason for the expectation, for the message.
        also: Other accepted shapes of the same values; the message names ``shape`` only.

    Raises:
        CheckpointError: The tensors have another shape or dtype, or are missing.
    """
    name = layer.name(0, projection, suffix)
    found = layer.shape(projection, suffix)
    reason = f" ({why})" if why else ""
    if layer.dtype(projection, suffix) not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        stored = layer.dtype(projection, suffix)
        stated = layer.stored_dtype(projection, suffix) if stored is None else str(stored).removeprefix("torch.")
        raise CheckpointError(f"{name} has dtype {stated}, expected {expected}{reason}")
    if found not in {tuple(accepted) for accepted in (shape, *also)}:
        raise CheckpointError(f"{name} has shape {list(found)}, expected {list(shape)}{reason}")
