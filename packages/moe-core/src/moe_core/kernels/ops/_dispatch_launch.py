"""Launch parameters of the kernels in `_dispatch_kernels`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops._sizes import power_of_two
from moe_core.kernels.ops.token_layout import TokenCode, TokenLayout
from moe_core.spec.numerics import FP8_E4M3, is_e8m0

#: values per program if a token may be split
_CHUNK = 2048
#: values per thread
_VECTOR = 8
#: largest number of programs that detect the last one by an atomic counter, since each needs a system-scope release
MOST_COUNTED = 1024


def tile(code: TokenCode) -> tuple[int, int, int, int]:
    """Return (groups per program, columns per group, programs per token, warps)."""
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
    """Launch `dispatch_kernel` on ``rows`` rows; see there for the arguments.

    With ``addresses``, ranks are signaled at byte ``signals``: by the last program, or by a separate launch if counting
    the programs would take longer.
    """
    from moe_core.kernels.ops._dispatch_kernels import dispatch_kernel

    chunks = tile(code)[2]
    top_k = topk_ids.shape[1]
    last_signals = addresses is not None and rows * chunks <= MOST_COUNTED
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
        TOP_K=top_k,
        BLOCK_K=power_of_two(top_k),
        BLOCK_W=power_of_two(ranks),
        ALIGNED=layout.is_aligned,
        SIGNAL=last_signals,
        **code_constants(code),
    )
    if addresses is not None and not last_signals:
        launch_signal(addresses, state, signals, me, ranks, begins=True)


def code_constants(code: TokenCode) -> dict[str, Any]:
    """Return the constants and options of a kernel that stores tokens as ``code``."""
    import triton.language as tl

    key = code.key
    names: dict[torch.dtype, Any] = {
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float32: tl.float32,
        torch.float8_e4m3fn: tl.float8e4nv,
        torch.int8: tl.int8,
    }
    groups, group, _, warps = tile(code)
    return {
        "CODE": "" if key is None else "e4m3" if key.dtype == FP8_E4M3 else "int8",
        "SCALE": "" if key is None else "e8m0" if is_e8m0(key.scale.dtype) else "float32",
        "dtype": names[code.code_dtype],
        "GROUPS": groups,
        "GROUP": group,
        "num_warps": warps,
        "enable_fp_fusion": False,  # the same bits as standalone quantization
    }


def launch_signal(addresses: Tensor, state: Tensor | None, place: int, me: int, ranks: int, *, begins: bool) -> None:
    """Signal to all ranks that all previous launches have completed.

    Signals are at byte ``place`` of the buffers.
    """
    from moe_core.kernels.ops._dispatch_kernels import signal_kernel

    launch(
        signal_kernel, (1,), addresses, state, place, me, ranks, NEXT=begins, BLOCK_W=power_of_two(ranks), num_warps=1
    )


def table_arguments(tables: Any) -> tuple[Any, ...]:
    """Return the tables of a placement as kernel arguments.

    See :class:`moe_core.parallel.placement.tables.ReplicaTables`.
    """
    experts, room = tables.slots.shape
    return tables.slots, tables.counts, experts, room
