"""Orders of rows."""

from __future__ import annotations

from moe_core import TensorError
from torch import Tensor


def deinterleave(tensor: Tensor) -> Tensor:
    """Rows gate 0, up 0, gate 1, up 1, ... (gpt-oss) as gate rows, then up rows.

    ``tensor`` [E, 2N, ...]: weights, scales or biases; a copy.  Raises TensorError for an odd number of rows.
    """
    if tensor.dim() < 2 or tensor.shape[1] % 2:
        raise TensorError(f"gate and up rows in turns are an even number, got shape {list(tensor.shape)}")
    experts, rows = tensor.shape[:2]
    return tensor.view(experts, rows // 2, 2, *tensor.shape[2:]).transpose(1, 2).reshape(tensor.shape)
