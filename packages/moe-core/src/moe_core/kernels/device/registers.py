"""Packed numbers in registers, and layout-preserving splits and joins of tensors."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def word_pointers(pointers):
    """Cast `pointers` to 16-bit scales to int32 words of two scales; leave others unchanged."""
    if pointers.dtype.element_ty.primitive_bitwidth == 16:
        return pointers.to(tl.pointer_type(tl.int32))
    else:
        return pointers


@triton.jit
def both_halves(words, dtype: tl.constexpr):
    """Return the two `dtype` numbers in each int32 as float32."""
    if dtype == tl.bfloat16:
        # as few operations as possible: their number influences where Triton converts layouts
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    else:
        return half_of(words, 0, dtype), half_of(words, 1, dtype)


@triton.jit
def half_of(words, place, dtype: tl.constexpr):
    """Return one 16-bit half of int32 `words`, of type `dtype`, as float32.

    `place` 0 is the lower half, 1 the upper half.
    """
    if dtype == tl.bfloat16:
        return ((words << (16 - 16 * place)) & -65536).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(dtype == tl.float16, "halves are bfloat16 or float16")
        return (words >> (16 * place)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def unpack(words, BITS: tl.constexpr):
    """Unpack int32 words [N, W] to codes [N, W, 32 / BITS], low bits first."""
    shifts = BITS * tl.arange(0, 32 // BITS)
    return (words[:, :, None] >> shifts[None, None, :]) & (2**BITS - 1)


@triton.jit
def join_last(values):
    """Join one, two or four tensors along a new last dimension.

    Joining and reshaping, unlike indexing, keeps elements in their threads and registers.
    """
    if len(values) == 1:
        return tl.expand_dims(values[0], -1)
    elif len(values) == 2:
        return tl.join(values[0], values[1])
    else:
        both = tl.join(tl.join(values[0], values[2]), tl.join(values[1], values[3]))
        return both.reshape(values[0].shape + [4])


@triton.jit
def split_last(x):
    """Split a last dimension of 1, 2 or 4: the inverse of `join_last`."""
    if x.shape[-1] == 1:
        return (x.reshape(x.shape[:-1]),)
    elif x.shape[-1] == 2:
        return x.split()
    else:
        even, odd = x.reshape(x.shape[:-1] + [2, 2]).split()
        value_0, value_2 = even.split()
        value_1, value_3 = odd.split()
        return value_0, value_1, value_2, value_3
