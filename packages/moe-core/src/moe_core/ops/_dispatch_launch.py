"""Launch parameters of the kernels in `_dispatch_kernels`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_core.jit.launch import launch
from moe_core.numerics import FP8_E4M3, is_e8m0
from moe_core.ops._sizes import power_of_two
from moe_core.ops.token_layout import TokenCode, TokenLayout

#: values of a token that a program takes where the token may be cut
_CHUNK = 2048
#: values of a thread
_VECTOR = 8


def tile(code: TokenCode) -> tuple[int, int, int, int]:
    """(groups of a program, columns of a group, programs of a token, warps)."""
    key = code.key
    if key is not None and key.group_shape.is_per_row:
        group, most = power_of_two(code.columns), 1
    else:
        group = 128 if key is None else key.group_size
        most = max(min(_CHUNK // group, power_of_two(-(-code.columns // group))), 1)
    warps = max(1, min(32, group * most // (32 * _VECTOR)))
    return most, group, -(-code.columns // (most * group)), warps


def launch_dispatch(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    adapter_ids: Tensor | None,
    tables: Any,
    code: TokenCode,
    layout: TokenLayout,
    places: Tensor,
    *,
    rows: int,
    ranks: int,
    copies: int,
    offset: int,
    out: Tensor | None = None,
    positions: Tensor | None = None,
    counts: Tensor | None = None,
    addresses: Tensor | None = None,
    state: Tensor | None = None,
    signals: int = 0,
    me: int = 0,
) -> None:
    """Run `dispatch_kernel` on ``rows`` rows; see there."""
    import triton.language as tl

    from moe_core.ops._dispatch_kernels import dispatch_kernel

    key = code.key
    names: dict[torch.dtype, Any] = {
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float32: tl.float32,
        torch.float8_e4m3fn: tl.float8e4nv,
        torch.int8: tl.int8,
    }
    groups, group, chunks, warps = tile(code)
    top_k = topk_ids.shape[1]
    launch(
        dispatch_kernel,
        (rows, chunks),
        x,
        topk_ids,
        topk_weights,
        adapter_ids,
        table_arguments(tables),
        out,
        addresses,
        positions,
        counts,
        places,
        layout.numbers,
        state,
        signals,
        x.shape[0],
        code.columns,
        x.stride(0),
        tables.stride,
        copies,
        offset,
        ranks,
        me,
        rows,
        CODE="" if key is None else "e4m3" if key.dtype == FP8_E4M3 else "int8",
        SCALE="" if key is None else "e8m0" if is_e8m0(key.scale.dtype) else "float32",
        dtype=names[code.code_dtype],
        TOP_K=top_k,
        BLOCK_K=power_of_two(top_k),
        GROUPS=groups,
        GROUP=group,
        BLOCK_W=power_of_two(ranks),
        ALIGNED=layout.is_aligned,
        num_warps=warps,
        enable_fp_fusion=False,  # as quantisation alone: the same bits
    )


def table_arguments(tables: Any) -> tuple[Any, ...]:
    """The tables of a placement (:class:`moe_core.expert_parallel.ReplicaTables`) as kernels take them."""
    experts, room = tables.slots.shape
    return tables.slots, tables.counts, experts, room
