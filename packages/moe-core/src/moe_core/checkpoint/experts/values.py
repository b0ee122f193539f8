"""Expert tensors that are stacked and looked at: values that no checkpoint may hold are refused by name and place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.stacks import Asking, BadValuesError, Stack, load_together
from moe_core.errors import CheckpointError
from moe_core.spec.numerics import is_e8m0
from moe_core.spec.quant_key import QuantKey


class Values(Enum):
    """What a tensor may hold.

    - ``FINITE``: no NaN, no Inf (weights, biases)
    - ``SCALE``: finite and not negative; e8m0 bytes other than 255
    - ``POSITIVE``: finite and greater than 0 (what a whole tensor or the activations are divided by)
    """

    FINITE = "finite"
    SCALE = "scale"
    POSITIVE = "positive"


def load_checked(
    layer: LayerExperts,
    projections: Sequence[str],
    suffix: str,
    values: Values,
    *,
    experts: Sequence[int],
    device: torch.device | str,
    arrange: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """:func:`moe_core.checkpoint.load_stacked` that raises CheckpointError for values that ``values`` does not allow.

    The message names the tensor, how many such values it has, and the first one's place in the file's tensor.
    """
    asking = checked(layer, projections, suffix, values, arrange=arrange)
    return load_together(layer, [asking], experts=experts, device=device)[0]


def checked(
    layer: LayerExperts,
    projections: Sequence[str],
    suffix: str,
    values: Values,
    *,
    arrange: Callable[[Tensor], Tensor] | None = None,
) -> Asking[Tensor]:
    """Asks for what :func:`load_checked` loads: ``tensor = yield from checked(...)``."""
    try:
        return (yield Stack(projections, suffix, arrange=arrange, check=partial(has_bad_values, values=values)))
    except BadValuesError as error:
        name = layer.name(error.expert, error.projection, suffix)
        count, total, where, what = 0, 0, [], ""
        # entry by entry: stacked tensors may be as large as the layer
        stacked = len(layer.checkpoint.info(name).shape) > len(layer.shape(error.projection, suffix))
        for expert in range(layer.num_experts) if stacked else (error.expert,):
            stored = layer.tensor(expert, error.projection, suffix)
            bad, what = bad_values(stored, values)
            if not count and bool(bad.any()):
                where = [*([expert] if stacked else []), *(int(i) for i in bad.nonzero()[0])]
            count += int(bad.sum())
            total += stored.numel()
        if not count:
            raise
        plural = "s" if count > 1 else ""
        raise CheckpointError(f"{name} has {count} {what} value{plural} of {total}, first at {where}") from None


def has_bad_values(tensor: Tensor, values: Values) -> Tensor:
    """Whether :func:`bad_values` finds any: a bool scalar on the tensor's device.

    By reductions, since every weight of a layer passes here: on a CPU they are some ten times as fast as comparing
    elements, and on a GPU they take no memory.
    """
    scale = values is not Values.FINITE
    if not tensor.numel():
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and not scale:
        # the largest of each sign: as unsigned numbers codes with a sign are the larger ones, as signed ones the others
        first = 0x7F if tensor.dtype is torch.float8_e4m3fn else 0x7C
        return (tensor.view(torch.uint8).max() >= 0x80 + first) | (tensor.view(torch.int8).max() >= first)
    if is_e8m0(tensor.dtype) and scale:
        return tensor.view(torch.uint8).max() == 255
    if not tensor.dtype.is_floating_point:
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    # NaN passes through, and makes every comparison false
    low, high = torch.aminmax(tensor.float() if tensor.dtype.itemsize == 1 else tensor)
    finite = (low > -math.inf) & (high < math.inf)
    if values is Values.POSITIVE:
        return ~(finite & (low > 0))
    return ~(finite & (low >= 0)) if values is Values.SCALE else ~finite


def bad_values(tensor: Tensor, values: Values) -> tuple[Tensor, str]:
    """(bool tensor of what ``values`` does not allow, its name for a message).  Bytes of a scale are e8m0 exponents."""
    scale = values is not Values.FINITE
    if tensor.dtype is torch.float8_e4m3fn and not scale:
        return (tensor.view(torch.uint8) & 0x7F) == 0x7F, "NaN"
    if tensor.dtype is torch.float8_e5m2 and not scale:
        return (tensor.view(torch.uint8) & 0x7F) >= 0x7C, "NaN or Inf"
    if is_e8m0(tensor.dtype) and scale:
        return tensor.view(torch.uint8) == 255, "NaN (e8m0 code 255)"
    if not tensor.dtype.is_floating_point:
        return torch.zeros_like(tensor, dtype=torch.bool), "refused"
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    bad = ~torch.isfinite(wide)
    if values is Values.POSITIVE:
        return bad | (wide <= 0), "zero, negative, NaN or Inf"
    if values is Values.SCALE:
        return bad | (wide < 0), "NaN, Inf or negative"
    return bad, "NaN or Inf"


def refuse_lost_weights(
    layer: LayerExperts,
    projections: Sequence[str],
    scale_suffix: str,
    weight: Tensor,
    scale: Tensor,
    key: QuantKey,
    *,
    experts: Sequence[int],
    is_zero: Callable[[Tensor], Tensor],
    weight_suffix: str = "weight",
    interleaved: bool = False,
) -> None:
    """CheckpointError for a scale of 0 over weights that are not 0.

    Such a scale underflowed in the tool that wrote it, and the values that it stood for are lost.  A scale of 0 over
    zeros is a pruned channel or block and exact.  ``weight`` [E, rows, cols] one element per entry and ``scale``: the
    canonical ones of ``projections``; ``is_zero``: codes -> bool tensor; ``interleaved``: gate and up rows lie in
    turns.  Reads weights only where a scale is 0.
    """
    zero = scale == 0
    if not bool(zero.any()):
        return
    gated = len(projections) == 2 or projections[0] == "gate_up"
    parts = 2 if gated else 1
    rows, cols = weight.shape[1] // parts, weight.shape[2]
    group_rows = rows if key.group_shape.row == -1 else key.group_shape.row
    group_cols = cols if key.group_shape.col == -1 else key.group_shape.col
    for slot in zero.flatten(1).any(dim=1).nonzero().flatten().tolist():
        grid = zero[slot].reshape(parts, -(-rows // group_rows), -(-cols // group_cols))
        covered = grid.repeat_interleave(group_rows, 1)[:, :rows].repeat_interleave(group_cols, 2)[:, :, :cols]
        lost = covered & ~is_zero(weight[slot]).reshape(parts, rows, cols)
        if not bool(lost.any()):
            continue
        part, row, col = (int(i) for i in lost.nonzero()[0])
        projection = projections[part] if len(projections) == 2 else projections[0]
        if len(projections) == 1:  # as the file has them
            row = 2 * row + part if interleaved else row + part * rows
        scale_name = layer.name(experts[slot], projection, scale_suffix)
        entry = f" of expert {experts[slot]}" if layer.stacked_names else ""
        raise CheckpointError(
            f"{scale_name} is 0{entry} where {layer.name(experts[slot], projection, weight_suffix)} is not "
            f"({int(lost.sum())} weights, first at [{row}, {col}]): expected a scale other than 0"
        )
