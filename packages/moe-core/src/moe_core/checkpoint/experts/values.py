"""Stack expert tensors and refuse invalid values, naming the tensor and the position."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.stacks import BadValuesError, ExpertStack, Query, load_together
from moe_core.errors import CheckpointError
from moe_core.reference.quantization import dequantize_weight
from moe_core.spec.numerics import is_e8m0
from moe_core.spec.quant_key import QuantKey


class Values(Enum):
    """Valid values of a tensor.

    - ``FINITE``: no NaN or Inf (weights, biases)
    - ``SCALE``: finite and not negative; for e8m0, any byte except 255
    - ``POSITIVE``: finite and greater than 0 (divisors of a whole tensor or of the activations)
    - ``INT4``: integers of -8 to 7 (4-bit codes, one per byte)
    """

    FINITE = "finite"
    SCALE = "scale"
    POSITIVE = "positive"
    INT4 = "int4"


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
    query = checked(layer, projections, suffix, values, arrange=arrange)
    return load_together(layer, [query], experts=experts, device=device)[0]


def checked(
    layer: LayerExperts,
    projections: Sequence[str],
    suffix: str,
    values: Values | None,
    *,
    arrange: Callable[[Tensor], Tensor] | None = None,
) -> Query[Tensor]:
    """Request what :func:`load_checked` loads, from inside a generator.

    Usage: ``tensor = yield from checked(...)``.

    Args:
        layer: The layer's expert tensors.
        projections: Projections in the order of their rows.
        suffix: Suffix of the tensors' names.
        values: Valid values; None if all are.
        arrange: Maps stored tensors of n experts ``[n, ...]`` to the result ``[n, rows, ...]``, both on the device.

    Returns:
        ``[E, rows, ...]`` for the requested experts.

    Raises:
        CheckpointError: A tensor holds invalid values.
    """
    if values is None:
        return (yield ExpertStack(projections, suffix, arrange=arrange))
    check: Callable[[Tensor], Tensor] | None = partial(has_bad_values, values=values)
    if values is Values.INT4 and arrange is not None:  # packing drops the bits that are checked
        arrange, check = partial(_check_first, arrange=arrange), None
    try:
        return (yield ExpertStack(projections, suffix, arrange=arrange, check=check))
    except BadValuesError as error:
        found = _located(layer, projections, suffix, values, error)
        if found is None:
            raise
        raise found from None


def _check_first(stored: Tensor, arrange: Callable[[Tensor], Tensor]) -> Tensor:
    if bool(has_bad_values(stored, Values.INT4)):
        raise BadValuesError("", 1, len(stored))
    return arrange(stored)


def _located(
    layer: LayerExperts, projections: Sequence[str], suffix: str, values: Values, error: BadValuesError
) -> CheckpointError | None:
    """Read the refused tensor, or all tensors if it is unknown, and describe its invalid values."""
    for projection in (error.projection,) if error.projection else projections:
        # One expert at a time, because a stacked tensor may be as large as the layer.
        first = layer.name(0, projection, suffix)
        stacked = len(layer.checkpoint.info(first).shape) > len(layer.shape(projection, suffix))
        every = [(expert,) for expert in range(layer.num_experts)]
        tensors = [range(layer.num_experts)] if stacked else [(error.expert,)] if error.projection else every
        for experts in tensors:
            count, total, where, what = 0, 0, [], ""
            for expert in experts:
                stored = layer.tensor(expert, projection, suffix)
                bad, what = bad_values(stored, values)
                if not count and bool(bad.any()):
                    where = [*([expert] if stacked else []), *(int(i) for i in bad.nonzero()[0])]
                count += int(bad.sum())
                total += stored.numel()
            if count:
                name, plural = layer.name(experts[0], projection, suffix), "s" if count > 1 else ""
                return CheckpointError(f"{name} has {count} {what} value{plural} of {total}, first at {where}")
    return None


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
    if values is Values.INT4:
        least, most = torch.aminmax(tensor)
        return (least < -8) | (most > 7)
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
    if values is Values.INT4:
        return (tensor < -8) | (tensor > 7), "out-of-range (expected -8 to 7)"
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
    suffixes: tuple[str, str],
    tensors: Mapping[str, Tensor],
    key: QuantKey,
    *,
    experts: Sequence[int],
    cols: int,
    interleaved: bool = False,
) -> None:
    """Refuse scales of 0 for weights that are not 0.

    Such a scale underflowed in the tool that wrote it, so the original values are lost. A scale of 0 for weights of 0
    is exact: it represents a pruned channel or block. Weights are examined only where a scale is 0.

    Args:
        layer: The layer's expert tensors.
        projections: Projections that make up the weight.
        suffixes: Suffixes of the weights and the scales, for the message.
        tensors: Canonical tensors of the weight by role: "weight", "scale" and those that ``key`` requires.
        key: Quantization of the weights.
        experts: Global ids of the experts.
        cols: Columns of the weight.
        interleaved: Whether gate and up rows are stored interleaved.

    Raises:
        CheckpointError: A scale is 0 and one of its weights is not.
    """
    zero = tensors["scale"] == 0
    if not bool(zero.any()):
        return
    fused = projections[0] == "gate_up"
    for slot in zero.flatten(1).any(dim=1).nonzero().flatten().tolist():
        one = slice(slot, slot + 1)
        zero_point, g_idx, scale2 = (
            tensors[role][one] if role in tensors else None for role in ("zero_point", "g_idx", "scale2")
        )
        lost = dequantize_weight(
            tensors["weight"][one],
            zero[one].to(tensors["scale"].dtype),
            key,
            parts=2 if fused else len(projections),
            zero_point=zero_point,
            g_idx=g_idx,
            scale2=scale2,
            cols=cols,
        )[0]
        if not bool(lost.any()):
            continue
        place, col = (int(i) for i in lost.nonzero()[0])
        part, row = divmod(place, len(lost) // len(projections))
        if fused and interleaved:  # convert to the row of the stored tensor
            is_up, pair = divmod(row, len(lost) // 2)
            row = 2 * pair + is_up
        weight, scale = (layer.name(experts[slot], projections[part], suffix) for suffix in suffixes)
        entry = f" of expert {experts[slot]}" if layer.stacked_names else ""
        raise CheckpointError(
            f"{scale} is 0{entry} where {weight} is not ({int((lost != 0).sum())} weights, first at [{row}, {col}]): "
            "expected a scale other than 0"
        )
