"""Codes in the order in which tensor-core registers hold them.

A thread of `mma.m16n8k16` (and of `wgmma`, whose warps hold the same) keeps, for each row and every 16 columns, values
2t, 2t + 1, 2t + 8 and 2t + 9, where t is its index among four. So an int32 word holds codes that one thread needs, and
the words of a thread are consecutive:

    4 bits, units of 128 columns   word 4t + u, bits 4p + 16i:      column 32u + 16s + 8j + 2t + i, with p = 2s + j
    8 bits, units of 64 columns    word 4t + s, bits 8j + 16i:      column 16s + 8j + 2t + i

for t, u, s (8 bits) of 0 to 3 and i, j, s (4 bits) of 0 and 1. Rows are padded with zeros to whole steps of 128
columns. Words are block-major: the words of all rows for one step are contiguous, so that a program reads one piece of
memory at a time.

Codes of e2m1 (sign, two exponent bits, one mantissa bit) are placed so that a word rotated left has one code of each
half where bfloat16 needs it (sign 15, exponent 8 and 7, mantissa 6):

    p = 0   not rotated                     p = 2   by 10
    p = 1   by 4                            p = 3   by 14, its mantissa by 6

8-bit tensor cores hold four consecutive columns per register. Codes of e2m1 that become e4m3 (order "e4m3"):

    word 4t + u:    magnitudes at bits 16h + 4j, signs at bit 8j + 7 - 4h:      column 32u + 16h + 4t + j

for h of 0 and 1 and j of 0 to 3. So the magnitudes of a half select four bytes, and its signs are where those bytes
need them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_dtype, check_shape
from moe_core.kernels.gemm.fragments._fragment_bits import columns_apart, e2m1_bits, signs_apart
from moe_core.kernels.ops._backend import use_triton
from moe_core.kernels.ops.layout import interleave_halves

#: Columns of a step, and words of a unit.
STEP, WORDS = 128, 16


def empty_words(experts: int, rows: int, columns: int, bits: int, device: torch.device) -> Tensor:
    """Allocate words for a matrix.

    Args:
        experts: Number of experts.
        rows: Number of rows.
        columns: Number of columns.
        bits: Bits per code.
        device: Device of the words.

    Returns:
        Uninitialized int32 [E, steps, rows, words of a step].
    """
    return torch.empty(experts, -(-columns // STEP), rows, STEP * bits // 32, dtype=torch.int32, device=device)


def order_words(
    codes: Tensor,
    columns: int,
    bits: int,
    *,
    order: str = "integers",
    interleaved: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Reorder codes into words.

    This runs on any device, on a GPU in one pass.

    Args:
        codes: uint8 [E, rows, ceil(columns * bits / 8)]; of 4-bit codes, even columns are the low bits.
        columns: Number of columns.
        bits: Bits per code.
        order: Use of the words: "integers", "e2m1" (becomes 16-bit values) or "e4m3".
        interleaved: Whether the rows are two halves, to be interleaved in blocks of 8 (:func:`interleave`).
        backend: "auto", or "torch" or "triton" to force one.

    Returns:
        int32 [E, steps, rows, words].

    Raises:
        ConfigError: The order does not support codes of ``bits`` bits.
        TensorError: The codes have another shape or dtype.
    """
    if (order, bits) not in ARRANGEMENTS:
        known = ", ".join(f"{name!r} of {size} bits" for name, size in ARRANGEMENTS)
        raise ConfigError(
            f"fragment order {order!r} is not supported for codes of {bits} bits; expected one of {known}"
        )
    check_dtype("codes", codes, (torch.uint8,))
    check_shape("codes", codes, ("E", "rows", "bytes"))
    experts, rows, size = codes.shape
    if size != -(-columns * bits // 8):
        raise TensorError(f"codes have {size} bytes per row, expected {-(-columns * bits // 8)} for {columns} columns")
    words = empty_words(experts, interleaved_rows(rows) if interleaved else rows, columns, bits, codes.device)
    if words.numel() == 0:
        return words
    if interleaved and rows % 16:
        # Rows that pad blocks of 8 are not written.
        words.zero_()
    width = words.shape[1] * words.shape[3]
    on_gpu = use_triton(codes, backend)
    if on_gpu and size % 4 == 0 and codes.is_contiguous() and codes.data_ptr() % 4 == 0:
        _launch(codes, words, bits, interleaved, order)
        return words
    for out, one in zip(words, codes, strict=True):
        whole = torch.nn.functional.pad(one, (0, width * 4 - size)).contiguous()
        if on_gpu:
            _launch((whole.clone() if whole.data_ptr() % 4 else whole)[None], out[None], bits, interleaved, order)
        else:
            ordered = _ordered(whole, bits, order)
            ordered = interleave(ordered[None])[0] if interleaved else ordered
            out.copy_(ordered.view(len(ordered), len(out), -1).transpose(0, 1))
    return words


def as_words(codes: Tensor) -> Tensor:
    """View bytes as words, padding rows that are not whole words.

    Args:
        codes: uint8 [E, rows, bytes].

    Returns:
        int32 [E, rows, ceil(bytes / 4)]. Padded rows start at multiples of 16 bytes.
    """
    if codes.shape[2] % 4:
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[2] % 16))
    elif codes.stride(2) != 1 or any(number % 4 for number in (codes.storage_offset(), *codes.stride()[:2])):
        codes = codes.clone(memory_format=torch.contiguous_format)
    return codes.view(torch.int32)


def interleaved_rows(rows: int) -> int:
    """Return the number of rows of two halves that are interleaved in blocks of 8.

    Args:
        rows: Rows of both halves.

    Returns:
        The number of rows, with each half padded to whole blocks.
    """
    return -(-(rows // 2) // 8) * 16


def interleave(x: Tensor) -> Tensor:
    """Interleave gate and up rows in blocks of 8.

    Args:
        x: [E, 2N, ...], gate rows followed by up rows.

    Returns:
        The interleaved tensor, with each half padded with zeros to whole blocks.
    """
    experts, rows = x.shape[:2]
    if rows % 16:
        halves = x.new_zeros(experts, 2, interleaved_rows(rows) // 2, *x.shape[2:])
        halves[:, :, : rows // 2].copy_(x.view(experts, 2, rows // 2, *x.shape[2:]))
        x = halves.flatten(1, 2)
    return interleave_halves(x, group=8)


_Operation = Callable[[Tensor], Tensor]
#: By order and bits: dimensions of a unit's 64 source bytes, the order of these dimensions in the words, and the
#: operations that are then applied to the words.
ARRANGEMENTS: dict[tuple[str, int], tuple[tuple[int, ...], tuple[int, ...], tuple[_Operation, ...]]] = {
    ("integers", 4): ((4, 4, 4), (2, 0, 1), (columns_apart,)),  # [u, p, t] to [t, u, p]
    ("integers", 8): ((4, 2, 4, 2), (2, 0, 3, 1), ()),  # [s, j, t, i] to [t, s, i, j]
    ("e2m1", 4): ((4, 4, 4), (2, 0, 1), (columns_apart, e2m1_bits)),
    ("e4m3", 4): ((4, 2, 4, 2), (2, 0, 1, 3), (signs_apart,)),  # [u, h, t, two of j] to [t, u, h, two of j]
}


def _ordered(codes: Tensor, bits: int, order: str) -> Tensor:
    """int32 [rows, words] of ``codes`` [rows, whole units]."""
    sizes, dims, operations = ARRANGEMENTS[order, bits]
    units = codes.view(codes.shape[0], -1, *sizes).permute(0, 1, *(2 + dim for dim in dims))
    words = units.reshape(codes.shape).view(torch.int32)
    for operation in operations:
        words = operation(words)
    return words


def _launch(codes: Tensor, out: Tensor, bits: int, interleaved: bool, order: str) -> None:
    """Launch the kernel; ``codes`` [E, rows, bytes] have rows of whole int32.

    They need not fill the words of ``out``.
    """
    import triton

    from moe_core.kernels.gemm.fragments._fragment_kernels import COMPILED, order_kernel
    from moe_core.kernels.launch.launch import launch

    sizes, dims, operations = ARRANGEMENTS[order, bits]
    per_step, block = out.shape[3] // WORDS, 128
    units = codes.shape[0] * codes.shape[1] * out.shape[1] * per_step
    launch(
        order_kernel,
        (triton.cdiv(units, block),),
        codes.view(torch.int32),
        out,
        units,
        out.shape[1],
        codes.shape[2] // 4,
        codes.shape[1],
        codes.shape[1] // 2,
        tuple(COMPILED[operation] for operation in operations),
        SIZES=sizes,
        DIMS=tuple(1 + dim for dim in dims),
        INTERLEAVED=interleaved,
        PER_STEP=per_step,
        BLOCK=block,
        num_warps=4,
    )
