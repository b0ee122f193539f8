"""Row orders of stacked gate and up matrices."""

from __future__ import annotations

from moe_core import TensorError
from torch import Tensor


def deinterleave(tensor: Tensor) -> Tensor:
    """Reorder rows gate 0, up 0, gate 1, up 1, ... (gpt-oss) to gate rows, then up rows.

    Args:
        tensor: weights, scales or biases [E, 2N, ...].

    Returns:
        A reordered copy.

    Raises:
        TensorError: the number of rows is odd.
    """
    if tensor.dim() < 2 or tensor.shape[1] % 2:
        raise TensorError(
            f"tensor has shape {list(tensor.shape)}, expected an even number of rows: gate and up, interleaved"
        )
    experts, rows = tensor.shape[:2]
    return tensor.view(experts, rows // 2, 2, *tensor.shape[2:]).transpose(1, 2).reshape(tensor.shape)
