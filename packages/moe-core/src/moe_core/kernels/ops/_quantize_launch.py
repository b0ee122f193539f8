"""Launch parameters of the kernels in `_quantize_kernels`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops._quantize_kernels import amax_kernel, group_kernel, row_kernel
from moe_core.kernels.ops._rows import Rows
from moe_core.kernels.ops._sizes import power_of_two

#: values per thread: one 16-byte load of 16-bit values
_VECTOR = 8
#: number of programs that fills a large GPU; beyond it each program does more work
_MANY_PROGRAMS = 2048
#: largest number of columns that a program keeps in registers
_MAX_ROW = 16384


def _tile(rows: int, columns: int, group: int) -> tuple[int, int, int]:
    """Return (groups per program, number of groups, warps)."""
    groups = rows * -(-columns // group)
    values = 1024 if groups * group <= 1024 * _MANY_PROGRAMS else 2048
    block = min(max(values // group, 1), power_of_two(groups))
    return block, groups, max(1, min(4, block * group // (32 * _VECTOR)))


def launch_groups(
    rows: Rows,
    out: Tensor,
    *,
    code: str,
    scale_kind: str,
    group: int = 0,
    scale: Tensor | None = None,
    fixed: Tensor | None = None,
    partials: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Launch `group_kernel`; ``group`` 0 means that groups have no separate scales."""
    group = group or min(256, power_of_two(rows.columns))
    block, groups, warps = _tile(rows.rows, rows.columns, group)
    grouped = scale_kind not in ("", "fixed", "partials")
    launch(
        group_kernel,
        (-(-groups // block),),
        *rows.kernel_arguments(out, scale if grouped else None),
        out,
        scale,
        fixed,
        rows.rows,
        scale.stride(-1) if grouped and scale is not None else 0,
        partials,
        **rows.constants(),
        CODE=code,
        SCALE=scale_kind,
        GROUP=group,
        BLOCK=block,
        PARTIALS=partials.numel() if partials is not None else 0,
        pdl=pdl,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def launch_rows(
    rows: Rows, out: Tensor, *, code: str, scale: Tensor, zero_point: Tensor | None = None, pdl: bool = False
) -> None:
    """Launch `row_kernel`."""
    block = min(power_of_two(rows.columns), _MAX_ROW)
    launch(
        row_kernel,
        (rows.rows,) if rows.columns else (0,),
        *rows.kernel_arguments(out, scale),
        out,
        scale,
        zero_point,
        rows.rows,
        **rows.constants(),
        CODE=code,
        CHUNKS=-(-rows.columns // block),
        BLOCK=block,
        pdl=pdl,
        num_warps=max(1, min(32, block // (64 * _VECTOR))),
        enable_fp_fusion=False,
    )


def launch_tensor(rows: Rows, out: Tensor, *, code: str, scale: Tensor, pdl: bool = False) -> None:
    """Quantize with one scale for the whole tensor, in two launches: partial maxima, then codes."""
    group = min(256, power_of_two(rows.columns))
    block, groups, warps = _tile(rows.rows, rows.columns, group)
    tiles = -(-groups // block)
    programs = min(512, power_of_two(tiles))
    partials = torch.empty(programs, dtype=torch.int32, device=out.device)
    arguments: tuple[Any, ...] = rows.kernel_arguments(out, None)
    launch(
        amax_kernel,
        (programs,),
        *arguments,
        partials,
        rows.rows,
        **rows.constants(),
        GROUP=group,
        BLOCK=block,
        STEPS=power_of_two(-(-tiles // programs)),  # few specializations; steps beyond the end are masked
        pdl=pdl,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    launch_groups(rows, out, code=code, scale_kind="partials", scale=scale, partials=partials, pdl=pdl)
