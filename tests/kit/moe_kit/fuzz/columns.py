"""Compare column shards read from a checkpoint with shards cut from the whole layer."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import torch
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.parallel.shard_plan import slice_columns


def check_columns(folder: Path) -> int:
    """Compare column ranges of a folder's layer, at its ends and inside.

    Args:
        folder: The checkpoint folder.

    Returns:
        The step that the ends of the ranges are multiples of.

    Raises:
        AssertionError: A range differs, or the format only reads whole layers.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = read_layer(Checkpoint.open(folder))
        whole = source.weights()
        unit, config = source.layout.column_unit, source.whole
        if unit is None:
            raise AssertionError(f"{source.format.name} says no column_unit: tensor-parallel ranks read all of a layer")
        key = whole.weight_key
        # The canonical form must be divisible there too.
        shape = (1, 1) if key is None else (key.group_shape.row, 1 if key.permuted else key.group_shape.col)
        packed = 1 if key is None or key.packing is None else key.packing.values_per_word
        step = math.lcm(unit, packed, *(extent for extent in shape if extent != -1))
        steps = -(-config.intermediate_size // step)
        ends = sorted({min(at * step, config.intermediate_size) for at in (0, 1, steps // 2, steps)})
        for begin in ends:
            for end in ends[ends.index(begin) + 1 :]:
                found = source.layout.load_columns(config, begin, end, experts=source.experts)
                expected = slice_columns(config, whole, begin, end, with_bias=True)
                names = {name for name, _ in found.tensors()} ^ {name for name, _ in expected.tensors()}
                if names:
                    raise AssertionError(f"columns {begin} to {end}: {sorted(names)} are there once only")
                for name, tensor in found.tensors():
                    other = getattr(expected, name)
                    if tensor.shape != other.shape or not torch.equal(_bits(tensor), _bits(other)):
                        raise AssertionError(
                            f"columns {begin} to {end}: {name} {list(tensor.shape)} is not that of the whole layer, "
                            f"{list(other.shape)}"
                        )
    return step


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
