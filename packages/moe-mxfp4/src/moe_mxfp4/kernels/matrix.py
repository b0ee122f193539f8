"""MXFP4 weights of a layer, as `moe_core.gemm.portable.layer` takes them."""

from __future__ import annotations

from functools import partial
from typing import Any

from moe_core.gemm import rows
from moe_core.gemm.launch import TileFunctions
from moe_core.gemm.portable import tiles
from moe_core.gemm.portable.kinds import ActivationKind
from moe_core.gemm.portable.layer import STEP, PackedMatrix
from torch import Tensor

from moe_mxfp4.kernels import e2m1, scaled

#: depth of float32 products, which no tensor core computes
SHORT_STEP = 32


def e2m1_matrix(
    words: Tensor,
    columns: int,
    scales: Tensor,
    factors: Tensor,
    *,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    step: int = STEP,
) -> PackedMatrix:
    """Weights of `PackedMatrix`, for activations of every kind.

    - ``words`` int32 [E, rows, words]: 8 codes each, low bits first
    - ``scales`` int32 [E, ceil(columns / 128), rows], ``factors`` float32 [E, rows]: see `moe_mxfp4.kernels.e2m1`
    """
    device = _device(words, scales, factors)
    return PackedMatrix(words, 4, columns, device, _functions, bias, None, input_scale, step)


def scaled_matrix(
    codes: Tensor, columns: int, scales: Tensor, factors: Tensor, *, bias: Tensor | None = None
) -> PackedMatrix:
    """Weights of `PackedMatrix` for MXFP8 activations, multiplied with their scales; see `moe_mxfp4.kernels.scaled`.

    - ``codes`` uint8 [E, rows, bytes], ``scales`` uint8 [E, rows, groups padded to 4], ``factors`` float32 [E, rows]
    """
    device = _device(codes, scales, factors)
    return PackedMatrix(codes, 4, columns, device, _scaled_functions, bias, scaled=True)


def _device(codes: Tensor, scales: Tensor, factors: Tensor) -> tuple[Any, ...]:
    return (
        codes,
        scales,
        factors,
        codes.stride(0),
        codes.stride(1),
        codes.shape[2],
        scales.stride(0),
        scales.stride(1),
        factors.stride(0),
    )


def _scaled_functions(kind: ActivationKind) -> TileFunctions:
    return TileFunctions(
        scaled.open_codes,
        scaled.load_codes,
        scaled.open_scaled,
        scaled.load_scaled,
        scaled.multiply_scaled,
        e2m1.finish,
    )


def _functions(kind: ActivationKind) -> TileFunctions:
    make = partial(TileFunctions, open_b=e2m1.open_e2m1, load_b=e2m1.load_e2m1)
    if kind is ActivationKind.BLOCK:
        a = (tiles.open_blocks, tiles.load_blocks)
        return make(*a, multiply=e2m1.multiply_blocks, finish=e2m1.finish)
    if kind in (ActivationKind.TOKEN, ActivationKind.EXPERT):
        return make(rows.open_values, rows.load_values, multiply=e2m1.multiply, finish=e2m1.finish_rows)
    return make(tiles.open_plain, rows.load_values, multiply=e2m1.multiply, finish=e2m1.finish)
