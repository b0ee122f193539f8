"""Convert the memory layout of expert weights at memory bandwidth on a GPU.

A backend's ``convert`` is composed of these functions. They never interpret values: tensors are moved in the widest
words that their rows allow, because moving single bytes reaches only a fraction of the memory bandwidth. Each function
writes a new tensor (or ``out``) and needs almost no further memory, so a conversion holds the source and one converted
copy. Consecutive steps share a temporary for a few experts (:func:`by_experts`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_core.errors import TensorError, check_dtype, check_shape

#: largest number of bytes that the steps of a conversion hold at a time; at least one expert
CHUNK_BYTES = 256 << 20

_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def swap_halves(w: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Exchange the halves of dimension 1: gate and up rows become up and gate rows.

    Args:
        w: Weights [E, 2N, ...].
        out: Tensor of the same shape to write to; allocated by default.

    Returns:
        The converted weights.

    Raises:
        TensorError: If ``w`` or ``out`` has the wrong shape, or ``out`` overlaps ``w``.
    """
    if w.dim() < 2 or w.shape[1] % 2:
        raise TensorError(f"w has shape {list(w.shape)}, expected [E, 2N, ...]")
    out = _output(out, tuple(w.shape), w)
    half = w.shape[1] // 2
    source, target = _words(w.flatten(1), out.flatten(1), unit=half * _row_bytes(w))
    middle = target.shape[1] // 2
    target[:, :middle].copy_(source[:, middle:])
    target[:, middle:].copy_(source[:, :middle])
    return out


def interleave_halves(w: Tensor, *, group: int = 1, out: Tensor | None = None) -> Tensor:
    """Interleave the halves of dimension 1 in groups of rows: g0, u0, g1, u1, ….

    Args:
        w: Weights [E, 2N, ...].
        group: Number of consecutive rows from each half.
        out: Tensor of the same shape to write to; allocated by default.

    Returns:
        The converted weights.

    Raises:
        TensorError: If N is not a multiple of ``group``, or ``out`` has the wrong shape or overlaps ``w``.
    """
    if w.dim() < 2 or group < 1 or w.shape[1] % (2 * group):
        raise TensorError(f"w has shape {list(w.shape)}, expected [E, 2N, ...] with N a multiple of {group}")
    out = _output(out, tuple(w.shape), w)
    unit = group * _row_bytes(w)
    source, target = _words(w.flatten(1), out.flatten(1), unit=unit)
    if target.numel():
        words = unit // target.element_size()
        target.view(w.shape[0], -1, 2, words).copy_(source.view(w.shape[0], 2, -1, words).transpose(1, 2))
    return out


def permute_rows(w: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Reorder the rows of each expert: ``out[e, r] = w[e, index[r]]``, or ``w[e, index[e, r]]``.

    Args:
        w: Weights [E, rows, ...].
        index: Rows [R] for all experts, or [E, R], int32 or int64. The values must be within 0..rows-1, which is not
            checked because it would wait for the device.
        out: Tensor [E, R, ...] to write to; allocated by default.

    Returns:
        The converted weights [E, R, ...].

    Raises:
        TensorError: If a tensor has the wrong shape or dtype, or ``out`` overlaps ``w``.
    """
    if w.dim() < 2:
        raise TensorError(f"w has shape {list(w.shape)}, expected [E, rows, ...]")
    check_dtype("index", index, (torch.int32, torch.int64))
    experts, rows = w.shape[:2]
    check_shape("index", index, ("R",) if index.dim() == 1 else (experts, "R"))
    out = _output(out, (experts, index.shape[-1], *w.shape[2:]), w)
    if not out.numel():
        return out
    w = w.contiguous()
    source, target = _words(w.flatten(0, 1).flatten(1), out.flatten(0, 1).flatten(1), unit=_row_bytes(w))
    first = torch.arange(experts, device=w.device)[:, None] * rows
    torch.index_select(source, 0, (first + index).flatten(), out=target)
    return out


def block_major(w: Tensor, block: int, *, index: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Convert to block-major layout: ``block`` columns of all rows are contiguous.

    Args:
        w: Weights [E, rows, K].
        block: Number of columns per block; divides K.
        index: Order of the rows [R], applied in the same pass as in :func:`permute_rows`.
        out: Tensor to write to; allocated by default.

    Returns:
        The converted weights [E, K / block, rows, block].

    Raises:
        TensorError: If a tensor has the wrong shape or dtype, or ``out`` overlaps ``w``.
    """
    check_shape("w", w, ("E", "rows", "K"))
    experts, rows, cols = w.shape
    if block < 1 or cols % block:
        raise TensorError(f"w has {cols} columns, expected a multiple of {block}")
    blocks, unit = cols // block, block * w.element_size()
    if index is None:
        out = _output(out, (experts, blocks, rows, block), w)
        source, target = _words(w, out, unit=unit)
        if target.numel():
            target.copy_(source.view(experts, rows, blocks, target.shape[-1]).transpose(1, 2))
        return out
    check_shape("index", index, ("R",))
    check_dtype("index", index, (torch.int32, torch.int64))
    out = _output(out, (experts, blocks, len(index), block), w)
    if not out.numel():
        return out
    flat = (experts, rows * blocks, block), (experts, blocks * len(index), block)
    source, target = _words(w.contiguous().view(flat[0]), out.view(flat[1]), unit=unit)
    pieces = index * blocks + torch.arange(blocks, device=index.device)[:, None]
    torch.index_select(source, 1, pieces.flatten(), out=target)
    return out


def pad_matrices(w: Tensor, rows: int, cols: int, *, parts: int = 1, out: Tensor | None = None) -> Tensor:
    """Pad each of the stacked matrices with zero rows and columns.

    Args:
        w: Weights [E, parts * R, C].
        rows: Rows per matrix after padding.
        cols: Columns after padding.
        parts: Number of stacked matrices.
        out: Tensor to write to; allocated by default.

    Returns:
        The padded weights [E, parts * rows, cols].

    Raises:
        TensorError: If the matrices are larger than the result, or ``out`` has the wrong shape or overlaps ``w``.
    """
    check_shape("w", w, ("E", "rows", "K"))
    experts, height, width = w.shape
    if parts < 1 or height % parts or height // parts > rows or width > cols:
        raise TensorError(f"w has shape {list(w.shape)}, expected {parts} matrices of at most {rows}x{cols} per expert")
    out = _output(out, (experts, parts * rows, cols), w)
    as_bytes, source = out.view(torch.uint8), w.contiguous().view(torch.uint8)
    grid = as_bytes.view(experts, parts, rows, as_bytes.shape[2])
    here, across = height // parts, source.shape[2]
    grid[:, :, here:].zero_()
    grid[:, :, :here, across:].zero_()
    inner = grid[:, :, :here, :across]
    given, target = _words(source.view(experts, parts, here, across), inner, unit=across)
    target.copy_(given)
    return out


def by_experts(step: Callable[[Tensor, Tensor], object], w: Tensor, out: Tensor) -> Tensor:
    """Call ``step(w[chunk], out[chunk])`` for successive chunks of experts.

    Temporaries between the functions that ``step`` composes then cover only one chunk: at most :data:`CHUNK_BYTES` and
    a sixteenth of ``w``, or one expert.

    Args:
        step: Converts a chunk of experts.
        w: Source [E, ...].
        out: Destination [E, ...].

    Returns:
        ``out``.

    Raises:
        TensorError: If ``out`` has another number of experts than ``w``.
    """
    if w.shape[:1] != out.shape[:1]:
        raise TensorError(f"out has shape {list(out.shape)}, expected [{w.shape[0]}, ...]")
    one = max(1, w[:1].numel() * w.element_size())
    count = max(1, min(CHUNK_BYTES // one, w.shape[0] // 16))
    for start in range(0, w.shape[0], count):
        step(w[start : start + count], out[start : start + count])
    return out


def _row_bytes(w: Tensor) -> int:
    return w[:1, :1].numel() * w.element_size()


def _output(out: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    check_shape("out", out, shape)
    check_dtype("out", out, (like.dtype,))
    if out.device != like.device or not out.is_contiguous():
        raise TensorError(f"out is on {out.device} with strides {out.stride()}, expected contiguous on {like.device}")
    if out.untyped_storage().data_ptr() == like.untyped_storage().data_ptr() and out.numel():
        raise TensorError("out shares memory with w, which would be overwritten while it is read")
    return out


def _words(source: Tensor, target: Tensor, *, unit: int) -> tuple[Tensor, Tensor]:
    """View both tensors as the widest words possible.

    The word size divides ``unit`` bytes, the strides and the addresses.
    """
    both = (source, target)
    for size, dtype in _WORDS.items():
        extents = [unit, *(t.data_ptr() if t.device.type != "meta" else 0 for t in both)]
        for t in both:
            extents.append(t.shape[-1] * t.element_size())
            extents += [stride * t.element_size() for stride in t.stride()[:-1]]
        if all(t.stride(-1) == 1 or t.shape[-1] <= 1 for t in both) and all(extent % size == 0 for extent in extents):
            return source.view(dtype), target.view(dtype)
    return source, target
