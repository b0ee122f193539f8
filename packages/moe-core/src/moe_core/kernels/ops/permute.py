"""Move rows between token order and expert order.

- :func:`gather_rows` brings tokens into expert order (permute); :func:`scatter_rows` is the inverse (unpermute)
- :func:`assign_slots` and :func:`batch_tokens` build the batched activation format ``[E_local, T_max, K]``

Rows are copied bit by bit, whatever their dtype, together with their quantization scales. An index out of range reads
and writes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_dtype, check_shape
from moe_core.kernels.ops._backend import use_triton

_INDEX = (torch.int32, torch.int64)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather_rows(
    x: Tensor,
    index: Tensor,
    *,
    per_row: int = 1,
    scale: Tensor | None = None,
    count: Tensor | None = None,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    pdl: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gather rows: ``out[p] = x[index[p] // per_row]``.

    Args:
        x: Rows [R, K], any dtype, contiguous columns.
        index: Source of each row [P], int32 or int64. An index outside 0 .. R * per_row gives a row of zeros. With
            ``per_row`` = top-k and the sorted pairs of :mod:`moe_core.kernels.ops.sort`, the result is in expert order.
        per_row: Number of index values per row of ``x``.
        scale: Scales [R, S] to gather with the rows, any strides.
        count: Number of valid rows, int32 [1]; later rows are not written.
        out: Rows [P, K] to write to; allocated by default.
        scale_out: Scales [P, S] to write to; allocated by default.
        pdl: Use programmatic dependent launch.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        ``(out, scale_out)``; the second is None without ``scale``.
    """
    _check_rows(x, index, per_row, scale, count)
    rows = index.shape[0]
    out = _output("out", out, (rows, x.shape[1]), x)
    scale_out = None if scale is None else _output("scale_out", scale_out, (rows, scale.shape[1]), scale)
    limit = x.shape[0] * per_row
    if use_triton(x, backend):
        _move(x, index, out, scale, scale_out, count, limit, per_row, scatter=False, pdl=pdl)
        return out, scale_out
    known = (index >= 0) & (index < limit)
    written = _first(count, rows, index.device)
    for source, target in ((x, out), (scale, scale_out)):
        if source is not None and target is not None:
            from_, to = _words(source), _words(target)
            moved = from_.new_zeros(rows, from_.shape[1])
            moved[known] = from_[index[known].long() // per_row]
            to[written] = moved[written]
    return out, scale_out


def scatter_rows(
    y: Tensor,
    index: Tensor,
    *,
    num_rows: int,
    per_row: int = 1,
    scale: Tensor | None = None,
    count: Tensor | None = None,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    pdl: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Scatter rows: ``out[index[p]] = y[p // per_row]``.

    Args:
        y: Rows [P / per_row, K].
        index: Destination of each row [P], int32 or int64. Values within 0 .. num_rows must be distinct; others are
            ignored.
        num_rows: Number of rows of the result.
        per_row: Number of destinations per row of ``y``.
        scale: Scales to scatter with the rows.
        count: Number of valid entries of ``index``, int32 [1].
        out: Rows [num_rows, K] to write to. Rows without a source are zero in a new tensor and untouched in a given
            one.
        scale_out: Scales [num_rows, S] to write to, likewise.
        pdl: Use programmatic dependent launch.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        ``(out, scale_out)``; the second is None without ``scale``.
    """
    _check_rows(y, index, 1, scale, count)
    if y.shape[0] * per_row != index.shape[0]:
        raise TensorError(f"index has {index.shape[0]} entries, expected {y.shape[0]} rows x {per_row}")
    out = _output("out", out, (num_rows, y.shape[1]), y, zeros=True)
    scale_out = (
        None if scale is None else _output("scale_out", scale_out, (num_rows, scale.shape[1]), scale, zeros=True)
    )
    if use_triton(y, backend):
        _move(y, index, out, scale, scale_out, count, num_rows, per_row, scatter=True, pdl=pdl)
        return out, scale_out
    known = (index >= 0) & (index < num_rows) & _first(count, index.shape[0], index.device)
    place = torch.arange(index.shape[0], device=index.device)[known] // per_row
    for source, target in ((y, out), (scale, scale_out)):
        if source is not None and target is not None:
            _words(target)[index[known].long()] = _words(source)[place]
    return out, scale_out


def assign_slots(
    topk_ids: Tensor,
    *,
    num_experts: int,
    max_tokens: int,
    expert_map: Tensor | None = None,
    pdl: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Assign each (token, slot) pair a row in ``[E, max_tokens, ...]``.

    The n-th pair of a local expert, in pair order, gets the row ``expert * max_tokens + n``. Ids out of range (or, with
    ``expert_map``, mapped out of range) and pairs beyond ``max_tokens`` get -1.

    Args:
        topk_ids: Expert ids [M, k], int32 or int64.
        num_experts: Number of local experts.
        max_tokens: Rows per expert.
        expert_map: Local expert number of each global id [E_global], int32.
        pdl: Use programmatic dependent launch.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        ``(places, counts)``: ``places`` [M, k] int32, the row of each pair; ``counts`` [E] int32, the rows per expert,
        without pairs beyond ``max_tokens``.
    """
    check_shape("topk_ids", topk_ids, ("M", "k"))
    check_dtype("topk_ids", topk_ids, _INDEX)
    if num_experts < 1 or max_tokens < 1 or num_experts * max_tokens >= 2**31:
        raise ConfigError(f"num_experts {num_experts} x max_tokens {max_tokens} must be within 1..2**31")
    if expert_map is not None:
        check_shape("expert_map", expert_map, ("E",))
        check_dtype("expert_map", expert_map, _INDEX)
    ids = topk_ids.contiguous()
    num_ids = num_experts if expert_map is None else expert_map.numel()
    if use_triton(ids, backend):
        from moe_core.kernels.launch.launch import launch
        from moe_core.kernels.ops._permute_kernels import assign_slots_kernel

        places = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
        counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
        block = min(1024, max(32, 1 << (ids.numel() - 1).bit_length())) if ids.numel() else 32
        launch(
            assign_slots_kernel,
            (num_experts,),
            ids,
            expert_map,
            places,
            counts,
            ids.numel(),
            num_ids,
            num_experts,
            max_tokens,
            HAS_MAP=expert_map is not None,
            # a power of two keeps specializations few; steps beyond the end are masked
            STEPS=1 << (max(1, -(-ids.numel() // block)) - 1).bit_length(),
            BLOCK=block,
            pdl=pdl,
            num_warps=4,
            enable_fp_fusion=False,
        )
        return places, counts
    local = ids.flatten().long()
    known = (local >= 0) & (local < num_ids)
    if expert_map is not None:
        local = torch.where(known, expert_map.long()[torch.where(known, local, 0)], -1)
        known = (local >= 0) & (local < num_experts)
    one_hot = torch.nn.functional.one_hot(torch.where(known, local, num_experts), num_experts + 1)
    number = one_hot.cumsum(0).gather(1, torch.where(known, local, num_experts)[:, None])[:, 0] - 1
    places = torch.where(known & (number < max_tokens), local * max_tokens + number, -1)
    counts = one_hot.sum(0)[:num_experts].clamp(max=max_tokens)
    return places.int().view(ids.shape), counts.int()


class BatchedTokens(NamedTuple):
    """Tokens in the batched activation format.

    Attributes:
        hidden_states: Hidden states [E, T, K]; rows after the valid ones are undefined.
        expert_num_tokens: Number of valid rows per expert [E], int32.
        places: Row of each pair in [E * T, K] [M, k], int32; -1 if it has none.
        scale: Scales [E, T, S], or None.
    """

    hidden_states: Tensor
    expert_num_tokens: Tensor
    places: Tensor
    scale: Tensor | None = None


def batch_tokens(
    x: Tensor,
    topk_ids: Tensor,
    *,
    num_experts: int,
    max_tokens: int,
    expert_map: Tensor | None = None,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    scale_out: Tensor | None = None,
    pdl: bool = False,
    backend: str = "auto",
) -> BatchedTokens:
    """Copy each token to the rows of its experts in the batched format, in two launches.

    :func:`assign_slots` defines the order, and which pairs get no row.

    Args:
        x: Hidden states [M, K].
        topk_ids: Expert ids [M, k].
        num_experts: Number of local experts.
        max_tokens: Rows per expert, T.
        expert_map: Local expert number of each global id [E_global], int32.
        scale: Scales [M, S] to copy with the rows.
        out: Hidden states [E, T, K] to write to, contiguous; allocated by default.
        scale_out: Scales [E, T, S] to write to, contiguous; allocated by default.
        pdl: Use programmatic dependent launch.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        The batched tokens.
    """
    check_shape("topk_ids", topk_ids, (x.shape[0], "k"))
    places, counts = assign_slots(
        topk_ids, num_experts=num_experts, max_tokens=max_tokens, expert_map=expert_map, pdl=pdl, backend=backend
    )
    shape = (num_experts, max_tokens)
    out = _output("out", out, (*shape, x.shape[1]), x)
    scale_out = None if scale is None else _output("scale_out", scale_out, (*shape, scale.shape[1]), scale)
    flat_scale = None
    if scale_out is not None:
        if not scale_out.is_contiguous():
            raise TensorError(f"scale_out has strides {scale_out.stride()}, expected a contiguous tensor")
        flat_scale = scale_out.view(-1, scale_out.shape[2])
    if not out.is_contiguous():
        raise TensorError(f"out has strides {out.stride()}, expected a contiguous tensor")
    scatter_rows(
        x,
        places.view(-1),
        num_rows=num_experts * max_tokens,
        per_row=topk_ids.shape[1],
        scale=scale,
        out=out.view(-1, x.shape[1]),
        scale_out=flat_scale,
        pdl=pdl,
        backend=backend,
    )
    return BatchedTokens(out, counts, places, scale_out)


def _check_rows(x: Tensor, index: Tensor, per_row: int, scale: Tensor | None, count: Tensor | None) -> None:
    check_shape("x", x, ("rows", "K"))
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise TensorError(f"x has column stride {x.stride(1)}, expected contiguous columns")
    check_shape("index", index, ("P",))
    check_dtype("index", index, _INDEX)
    if per_row < 1:
        raise ConfigError(f"per_row must be positive, got {per_row}")
    if scale is not None:
        check_shape("scale", scale, (x.shape[0], "S"))
    if count is not None:
        check_shape("count", count, (1,))
        check_dtype("count", count, _INDEX)


def _output(name: str, out: Tensor | None, shape: tuple[int, ...], like: Tensor, *, zeros: bool = False) -> Tensor:
    if out is None:
        make = torch.zeros if zeros else torch.empty
        return make(shape, dtype=like.dtype, device=like.device)
    check_shape(name, out, shape)
    check_dtype(name, out, (like.dtype,))
    if out.shape[-1] > 1 and out.stride(-1) != 1 and not name.startswith("scale"):
        raise TensorError(f"{name} has column stride {out.stride(-1)}, expected contiguous columns")
    return out


def _words(x: Tensor) -> Tensor:
    """View ``x`` as integers of the same size."""
    return x.view(_WORDS[x.element_size()])


def _first(count: Tensor | None, rows: int, device: torch.device) -> Tensor:
    """Return bool [rows]: whether the row is before ``count``."""
    if count is None:
        return torch.ones(rows, dtype=torch.bool, device=device)
    return torch.arange(rows, device=device) < count


def _move(
    source: Tensor,
    index: Tensor,
    target: Tensor,
    scale: Tensor | None,
    scale_out: Tensor | None,
    count: Tensor | None,
    limit: int,
    per_row: int,
    *,
    scatter: bool,
    pdl: bool,
) -> None:
    from moe_core.kernels.launch.launch import launch
    from moe_core.kernels.ops._permute_kernels import move_rows_kernel

    rows, columns = index.shape[0], source.shape[1]
    # four 16-byte loads per thread in a program of 128 threads; one for few rows
    width = (2048 if rows * columns < 2**21 else 8192) // source.element_size()
    block = min(width, 1 << max(columns - 1, 0).bit_length())
    groups = scale.shape[1] if scale is not None else 0
    launch(
        move_rows_kernel,
        (rows, -(-columns // block)),
        _words(source),
        index.contiguous(),
        _words(target),
        None if scale is None else _words(scale),
        None if scale_out is None else _words(scale_out),
        count,
        limit,
        columns,
        groups,
        source.stride(0),
        target.stride(0),
        *(scale.stride() if scale is not None else (0, 0)),
        *(scale_out.stride() if scale_out is not None else (0, 0)),
        PER_ROW=per_row,
        SCATTER=scatter,
        BLOCK=block,
        BLOCK_S=1 << max(groups - 1, 0).bit_length(),
        pdl=pdl,
        num_warps=max(1, min(4, block * source.element_size() // 512)),
        enable_fp_fusion=False,
    )
