"""A checkpoint without the experts that moe-core runs, as if all of it had been stored in 16 bits.

transformers loads from a mapping of names to things that give a tensor when they are indexed.  A linear layer that the
checkpoint has quantised becomes one entry, its weight, which is read and dequantised then; so whatever transformers
does to names and tensors of a model's checkpoints in 16 bits fits, and no package of the tool that quantised it is
needed.
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
    """A tensor of that ``shape``, read where it is indexed; a part of it has memory of its own."""

    def __init__(self, read: Callable[[], Tensor], shape: Sequence[int]) -> None:
        self._read = read
        self._shape = shape

    def get_shape(self) -> list[int]:
        """As of the slices of safetensors: transformers asks it where ranks have parts."""
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
    """All tensors of ``checkpoint`` but ``left_out``; quantised weights in ``dtype``, dequantised on ``device``.

    ``target``: where others are read to.
    Raises CheckpointError for a quantised weight that no installed format reads.
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
