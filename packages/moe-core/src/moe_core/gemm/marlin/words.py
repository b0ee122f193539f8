"""Codes in the order in which the registers of the tensor cores hold them.

A thread of `mma.m16n8k16` (and of `wgmma`, whose warps hold the same) keeps of each row and every 16 columns the
numbers 2t, 2t + 1, 2t + 8 and 2t + 9, where t is its number among four.  So an int32 word has codes that one thread
needs, and the words of a thread follow one another:

    4 bits, units of 128 columns   word 4t + u, bits 4p + 16i:      column 32u + 16s + 8j + 2t + i, with p = 2s + j
    8 bits, units of 64 columns    word 4t + s, bits 8j + 16i:      column 16s + 8j + 2t + i

for t, u, s (8 bits) of 0 to 3 and i, j, s (4 bits) of 0 and 1.  Rows are filled up with zeros to whole units.

Numbers of e2m1 (a sign, two bits of exponent, one of mantissa) are spread in the 16 bits of their half of a word, so
that one shift puts three of the four where bfloat16 has them (sign 15, exponent 8 and 7, mantissa 6):

    p = 0   sign 15, the rest 8 to 6        p = 2   sign 9, the rest 2 to 0
    p = 1   sign 12, the rest 5 to 3        p = 3   sign 14, exponent 11 and 10, mantissa 13

Tensor cores of 8-bit numbers have four consecutive columns in a register.  Numbers of e2m1 that become e4m3 ("e4m3"):

    word 4t + u:    magnitudes at bits 16h + 4j, signs at bit 8j + 7 - 4h:      column 32u + 16h + 4t + j

for h of 0 and 1 and j of 0 to 3, so that a half's magnitudes select four bytes and its signs lie where those need them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_dtype, check_shape
from moe_core.ops._backend import use_triton

#: columns of a unit, which is 16 words
UNIT = {4: 128, 8: 64}
WORDS = 16
#: what words are made for: integers, or e2m1 that is to become 16-bit numbers, or e4m3
ORDERS = ("integers", "e2m1", "e4m3")


def words_of(columns: int, bits: int, step: int = 128) -> int:
    """Words of a row of so many columns, filled up to whole steps of ``step`` columns."""
    return -(-columns // step) * (step // UNIT[bits]) * WORDS


def order_words(
    codes: Tensor,
    columns: int,
    bits: int,
    *,
    order: str = "integers",
    interleaved: bool = False,
    step: int = 128,
    backend: str = "auto",
) -> Tensor:
    """int32 [E, rows, words] of ``codes`` uint8 [E, rows, ceil(columns * bits / 8)], 4-bit ones with even k low.

    ``order``: one of :data:`ORDERS`; ``interleaved``: the rows are two halves, interleaved in blocks of 8
    (:func:`interleave`).  Any device, at the memory's speed on a GPU; ``backend`` "torch" or "triton" insists.
    Raises TensorError for codes of another shape or dtype.
    """
    if bits not in UNIT:
        raise ConfigError(f"codes have 4 or 8 bits, got {bits}")
    if order not in ORDERS:
        raise ConfigError(f"the order of words is one of {', '.join(ORDERS)}, got {order!r}")
    if order != "integers" and bits != 4:
        raise ConfigError(f"codes of e2m1 have 4 bits, got {bits}")
    check_dtype("codes", codes, (torch.uint8,))
    check_shape("codes", codes, ("E", "rows", "bytes"))
    experts, rows, size = codes.shape
    if size != -(-columns * bits // 8):
        raise TensorError(f"codes have {size} bytes a row, expected {-(-columns * bits // 8)} for {columns} columns")
    width = words_of(columns, bits, step)
    words = _empty(experts, interleaved_rows(rows) if interleaved else rows, width, codes, filled=interleaved)
    if words.numel() == 0:
        return words
    on_gpu = use_triton(codes, backend)
    if on_gpu and size == width * 4 and codes.is_contiguous() and codes.data_ptr() % 4 == 0:
        _launch(codes, words, bits, interleaved, order)
        return words
    for out, one in zip(words, codes, strict=True):
        whole = torch.nn.functional.pad(one, (0, width * 4 - size)).contiguous()
        if on_gpu:
            _launch((whole.clone() if whole.data_ptr() % 4 else whole)[None], out[None], bits, interleaved, order)
            continue
        ordered = torch.empty(rows, width, dtype=torch.int32, device=codes.device)
        _ON_CPU[order, bits](whole, ordered)
        out.copy_(interleave(ordered[None])[0] if interleaved else ordered)
    return words


def _empty(experts: int, rows: int, width: int, like: Tensor, *, filled: bool) -> Tensor:
    """Room for words; rows that fill up turns are not written."""
    make = torch.zeros if filled and rows != like.shape[1] else torch.empty
    return make(experts, rows, width, dtype=torch.int32, device=like.device)


def interleaved_rows(rows: int) -> int:
    """Rows of two halves interleaved in blocks of 8."""
    return -(-(rows // 2) // 8) * 16


def interleave(x: Tensor) -> Tensor:
    """[E, 2N, ...] with gate and up rows interleaved in blocks of 8, each half padded with zeros to whole blocks."""
    experts, rows = x.shape[:2]
    half = rows // 2
    turns = -(-half // 8)
    out = torch.zeros(experts, turns, 2, 8, *x.shape[2:], dtype=x.dtype, device=x.device)
    whole = half // 8
    halves = x.view(experts, 2, half, *x.shape[2:])
    out[:, :whole].copy_(halves[:, :, : whole * 8].reshape(experts, 2, whole, 8, *x.shape[2:]).transpose(1, 2))
    if half % 8:
        out[:, whole, :, : half % 8].copy_(halves[:, :, whole * 8 :])
    return out.flatten(1, 3)


def _order_4(codes: Tensor, out: Tensor) -> None:
    """``codes`` [rows, units * 64] to ``out`` [rows, units * 16]."""
    rows = codes.shape[0]
    # byte t of canonical word 4u + p has columns 32u + 8p + 2t and the next
    view = codes.view(rows, -1, 4, 4, 4).int()
    total = torch.zeros(rows, view.shape[1], 4, 4, dtype=torch.int32, device=codes.device)
    for p in range(4):
        byte = view[:, :, :, p]
        total |= (byte & 15) << (4 * p) | (byte >> 4) << (4 * p + 16)
    out.view(rows, -1, 4, 4).copy_(total.transpose(2, 3))


def _order_e2m1(codes: Tensor, out: Tensor) -> None:
    """As `_order_4`, with the bits of e2m1 spread."""
    words = torch.empty_like(out)
    _order_4(codes, words)
    out.zero_()
    for p, moves in enumerate((((7, 6), (8, 12)), ((7, 3), (8, 9)), ((7, 0), (8, 6)), ((1, 13), (6, 9), (8, 11)))):
        nibble = words >> (4 * p) & 0x000F000F
        for mask, shift in moves:
            out |= (nibble & (mask | mask << 16)) << shift


def _order_e4m3(codes: Tensor, out: Tensor) -> None:
    """``codes`` [rows, units * 64] to ``out`` [rows, units * 16]."""
    rows = codes.shape[0]
    # 16 bits are four columns: [unit, u, h, t]
    quarters = codes.view(torch.int16).view(rows, -1, 4, 2, 4).int() & 0xFFFF
    lower, upper = quarters.unbind(3)
    total = (lower | upper << 16) & 0x77777777
    for j in range(4):
        total |= (lower >> (4 * j + 3) & 1) << (8 * j + 7) | (upper >> (4 * j + 3) & 1) << (8 * j + 3)
    out.view(rows, -1, 4, 4).copy_(total.transpose(2, 3))


def _order_8(codes: Tensor, out: Tensor) -> None:
    """``codes`` [rows, units * 64] to ``out`` [rows, units * 16]."""
    rows = codes.shape[0]
    # [unit, s, j, t, i] to [unit, t, s, i, j]
    view = codes.view(rows, -1, 4, 2, 4, 2)
    out.view(torch.uint8).view(rows, -1, 4, 4, 2, 2).copy_(view.permute(0, 1, 4, 2, 5, 3))


#: by order and bits
_ON_CPU = {
    ("integers", 4): _order_4,
    ("integers", 8): _order_8,
    ("e2m1", 4): _order_e2m1,
    ("e4m3", 4): _order_e4m3,
}


def _launch(codes: Tensor, out: Tensor, bits: int, interleaved: bool, order: str) -> None:
    import triton

    from moe_core.gemm.marlin._word_kernels import order_kernel
    from moe_core.jit.launch import launch

    units = codes.numel() // (4 * WORDS)
    block = 128
    launch(
        order_kernel,
        (triton.cdiv(units, block),),
        codes.view(torch.int32),
        out,
        units,
        out.shape[2] // WORDS,
        codes.shape[1],
        codes.shape[1] // 2,
        BITS=bits,
        ORDER=order,
        INTERLEAVE=interleaved,
        BLOCK=block,
        num_warps=4,
    )
