"""Scales of canonical integer weights in the layout of the family, with their zero points."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.gemm.marlin.words import interleave, interleaved_rows
from moe_core.ops._backend import use_triton

#: the last bits of a float32 scale, in whose place a zero point stands
ZERO_BITS = 9


def order_scales(
    scale: Tensor, zero_point: Tensor | None = None, *, interleaved: bool = False, backend: str = "auto"
) -> Tensor:
    """``scale`` [E, rows, groups] of any float dtype as [E, groups, rows]: float32, with zero points int32.

    ``zero_point`` uint8 or int32 of the same shape, 0 to 256: int32 has the bits of the float32 scale, rounded to 14
    bits of mantissa, and zero points in the last ones.  ``interleaved``: the rows are two halves, interleaved in blocks
    of 8 (:func:`moe_core.gemm.marlin.words.interleave`).  ``backend`` "torch" or "triton" insists.
    """
    if use_triton(scale, backend):
        return _launch(scale.contiguous(), zero_point, interleaved)
    wide = scale.float() if zero_point is None else _with_zero_points(scale, zero_point)
    return (interleave(wide) if interleaved else wide).transpose(1, 2).contiguous()


def _with_zero_points(scale: Tensor, zero_point: Tensor) -> Tensor:
    bits = scale.float().contiguous().view(torch.int32)
    # rounded to the nearest; 16-bit types have zeros there
    last = 1 << ZERO_BITS
    return ((bits + last // 2) & -last).bitwise_or_(zero_point)


def _launch(scale: Tensor, zero_point: Tensor | None, interleaved: bool) -> Tensor:
    import triton

    from moe_core.gemm.marlin._scale_kernels import ROWS, order_scales_kernel
    from moe_core.jit.launch import launch

    experts, rows, groups = scale.shape
    width = interleaved_rows(rows) if interleaved else rows
    # rows that fill up turns are not written
    make = torch.empty if width == rows else torch.zeros
    dtype = torch.float32 if zero_point is None else torch.int32
    out = make(experts, groups, width, dtype=dtype, device=scale.device)
    if out.numel():
        launch(
            order_scales_kernel,
            (experts * triton.cdiv(rows, ROWS.value), triton.cdiv(groups, 16)),
            scale,
            None if zero_point is None else zero_point.contiguous(),
            out,
            rows,
            groups,
            width,
            INTERLEAVE=interleaved,
            ZERO_BITS=ZERO_BITS,
            num_warps=4,
        )
    return out
