"""View of a checkpoint's non-expert tensors, as if they were all stored in 16 bits.

transformers loads from a mapping of names to objects that return a tensor when indexed. A quantized linear layer
becomes one entry, its weight, which is read and dequantized when indexed. As a result, transformers' conversions of
names and tensors for 16-bit checkpoints apply unchanged, and the quantization tool's package is not needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from moe_core import Checkpoint
from moe_core.api.models import quantized_linears
from torch import Tensor


class LazyTensor:
    """Tensor that is read when it is indexed; a slice of it owns its memory.

    Args:
        read: function that reads the whole tensor.
        shape: shape of the tensor.
    """

    def __init__(self, read: Callable[[], Tensor], shape: Sequence[int]) -> None:
        self._read = read
        self._shape = shape

    def get_shape(self) -> list[int]:
        """Return the shape, like safetensors slices; transformers calls it for sharded tensors."""
        return list(self._shape)

    def __getitem__(self, index: Any) -> Tensor:
        whole = self._read()
        part = whole[index]
        return part if part.numel() == whole.numel() else part.clone()


def dense_tensors(
    checkpoint: Checkpoint,
    left_out: Iterable[str],
    dtype: torch.dtype,
    device: torch.device | str,
    target: torch.device | str = "cpu",
) -> Mapping[str, LazyTensor]:
    """Map names to all tensors of a checkpoint except ``left_out``, read lazily.

    Args:
        checkpoint: the checkpoint.
        left_out: names of tensors to omit.
        dtype: dtype of dequantized weights.
        device: device on which weights are dequantized.
        target: device to which other tensors are read.

    Returns:
        Lazy tensors by name.

    Raises:
        CheckpointError: no installed format reads a quantized weight.
    """
    without = set(left_out)
    names = [name for name in checkpoint.names if name not in without]
    found: dict[str, LazyTensor] = {}
    for linear in quantized_linears(checkpoint, names):
        found[f"{linear.name}.weight"] = LazyTensor(functools.partial(linear.dequantize, dtype, device), linear.shape)
        without.update(linear.tensors)
    for name in names:
        if name not in without:
            found[name] = LazyTensor(functools.partial(checkpoint.tensor, name, target), checkpoint.info(name).shape)
    return found
