"""Stack expert tensors and refuse invalid values, naming the tensor and the position."""

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
    """Valid values of a tensor.

    - ``FINITE``: no NaN or Inf (weights, biases)
    - ``SCALE``: finite and not negative; for e8m0, any byte except 255
    - ``POSITIVE``: finite and greater than 0 (divisors of a whole tensor or of the activations)
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
    """Read stacked tensors and refuse invalid values.

    See also :func:`moe_core.checkpoint.load_stacked`.

    Args:
        layer: The layer's expert tensors.
        projections: Projections in the order of their rows.
        suffix: Suffix of the tensors' names.
        values: Valid values.
        experts: Global ids of the experts.
        device: Where the result is allocated.
        arrange: Maps stored tensors of n experts ``[n, ...]`` to the result ``[n, rows, ...]``, both on the device.

    Returns:
        ``[len(experts), rows, ...]`` on ``device``.

    Raises:
        CheckpointError: A tensor holds invalid values. The message names the tensor, the number of such values, and
            the position of the first one in the stored tensor.
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
    """Request what :func:`load_checked` loads, from inside a generator.

    Usage: ``tensor = yield from checked(...)``.

    Args:
        layer: The layer's expert tensors.
        projections: Projections in the order of their rows.
        suffix: Suffix of the tensors' names.
        values: Valid values.
        arrange: Maps stored tensors of n experts ``[n, ...]`` to the result ``[n, rows, ...]``, both on the device.

    Returns:
        ``[E, rows, ...]`` for the requested experts.

    Raises:
        CheckpointError: A tensor holds invalid values.
    """
    try:
        return (yield Stack(projections, suffix, arrange=arrange, check=partial(has_bad_values, values=values)))
    except BadValuesError as error:
        name = layer.name(error.expert, error.projection, suffix)
        count, total, where, what = 0, 0, [], ""
        # One expert at a time, because a stacked tensor may be as large as the layer.
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
    """Return whether a tensor has invalid values, without locating them.

    It uses reductions, because every weight of a layer is checked. On a CPU they are about ten times as fast as
    elementwise comparisons, and on a GPU they allocate no memory.

    Args:
        tensor: The tensor to check.
        values: Valid values.

    Returns:
        Bool scalar on the tensor's device.
    """
    scale = values is not Values.FINITE
    if not tensor.numel():
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and not scale:
        # The maximum as uint8 is the largest code with the sign bit set, the maximum as int8 the largest one without.
        first = 0x7F if tensor.dtype is torch.float8_e4m3fn else 0x7C
        return (tensor.view(torch.uint8).max() >= 0x80 + first) | (tensor.view(torch.int8).max() >= first)
    if is_e8m0(tensor.dtype) and scale:
        return tensor.view(torch.uint8).max() == 255
    if not tensor.dtype.is_floating_point:
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    # aminmax propagates NaN, for which every comparison is false.
    low, high = torch.aminmax(tensor.float() if tensor.dtype.itemsize == 1 else tensor)
    finite = (low > -math.inf) & (high < math.inf)
    if values is Values.POSITIVE:
        return ~(finite & (low > 0))
    return ~(finite & (low >= 0)) if values is Values.SCALE else ~finite


def bad_values(tensor: Tensor, values: Values) -> tuple[Tensor, str]:
    """Locate the invalid values of a tensor; bytes of a scale are e8m0 exponents.

    Args:
        tensor: The tensor to check.
        values: Valid values.

    Returns:
        (bool tensor that is True at invalid values, description of such values for a message).
    """
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
    """Refuse scales of 0 for weights that are not 0.

    Such a scale underflowed in the tool that wrote it, so the original values are lost. A scale of 0 for weights of 0
    is exact: it represents a pruned channel or block. Weights are examined only where a scale is 0.

    Args:
        layer: The layer's expert tensors.
        projections: Projections that make up ``weight``.
        scale_suffix: Suffix of the scales, for the message.
        weight: Canonical codes [E, rows, cols], one element per entry.
        scale: Canonical scales of ``weight``.
        key: Quantization of the weights, which gives the group shape.
        experts: Global ids of the experts.
        is_zero: Maps codes to a bool tensor that is True where the value is 0.
        weight_suffix: Suffix of the weights, for the message.
        interleaved: Whether gate and up rows are stored interleaved.

    Raises:
        CheckpointError: A scale is 0 and one of its weights is not.
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
        if len(projections) == 1:  # convert to the row of the stored tensor
            row = 2 * row + part if interleaved else row + part * rows
        scale_name = layer.name(experts[slot], projection, scale_suffix)
        entry = f" of expert {experts[slot]}" if layer.stacked_names else ""
        raise CheckpointError(
            f"{scale_name} is 0{entry} where {layer.name(experts[slot], projection, weight_suffix)} is not "
            f"({int(lost.sum())} weights, first at [{row}, {col}]): expected a scale other than 0"
        )
