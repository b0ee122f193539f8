"""MXFP4 weights of a layer, as the fused layer takes them."""

from __future__ import annotations

from functools import partial
from typing import Any

from moe_core.experts_api import ActivationKind
from moe_core.kernel_api import (
    STEP,
    GemmWeight,
    TileFunctions,
    load_blocks,
    load_values,
    open_blocks,
    open_plain,
    open_values,
    packed_weight,
)
from torch import Tensor

from moe_mxfp4.kernels import e2m1, scaled

#: depth of float32 products, which no tensor core computes
SHORT_STEP = 32


def e2m1_weight(
    words: Tensor,
    rows: int,
    columns: int,
    scales: Tensor,
    channel_scales: Tensor,
    *,
    kind: ActivationKind,
    bias: Tensor | None = None,
    step: int = STEP,
) -> GemmWeight:
    """A weight for activations of any kind; ``rows`` of one half.

    - ``words`` int32 [E, rows, words]: 8 codes each, low bits first
    - ``scales`` int32 [E, ceil(columns / 128), rows], ``channel_scales`` float32 [E, rows]: see
      `moe_mxfp4.kernels.e2m1`
    """
    arguments = _arguments(words, scales, channel_scales)
    return packed_weight(words, 4, rows, columns, arguments, _functions(kind), bias=bias, step=step)


def scaled_weight(
    codes: Tensor, rows: int, columns: int, scales: Tensor, channel_scales: Tensor, *, bias: Tensor | None = None
) -> GemmWeight:
    """A weight for MXFP8 activations, multiplied with its scales; see `moe_mxfp4.kernels.scaled`.

    - ``codes`` uint8 [E, rows, bytes], ``scales`` uint8 [E, rows, groups padded to 4], ``channel_scales`` float32 [E,
      rows]
    """
    functions = TileFunctions(
        scaled.open_codes,
        scaled.load_codes,
        scaled.open_scaled,
        scaled.load_scaled,
        scaled.multiply_scaled,
        e2m1.scale_acc,
    )
    return packed_weight(codes, 4, rows, columns, _arguments(codes, scales, channel_scales), functions, bias=bias)


def _arguments(codes: Tensor, scales: Tensor, channel_scales: Tensor) -> tuple[Any, ...]:
    return (
        codes,
        scales,
        channel_scales,
        codes.stride(0),
        codes.stride(1),
        codes.shape[2],
        scales.stride(0),
        scales.stride(1),
        channel_scales.stride(0),
    )


def _functions(kind: ActivationKind) -> TileFunctions:
    make = partial(TileFunctions, open_b=e2m1.open_e2m1, load_b=e2m1.load_e2m1)
    if kind is ActivationKind.BLOCK:
        a = (open_blocks, load_blocks)
        return make(*a, multiply=e2m1.scaled_mm_blockwise, scale_acc=e2m1.scale_acc)
    if kind in (ActivationKind.TOKEN, ActivationKind.EXPERT):
        return make(open_values, load_values, multiply=e2m1.multiply, scale_acc=e2m1.scale_acc_rows)
    return make(open_plain, load_values, multiply=e2m1.multiply, scale_acc=e2m1.scale_acc)
