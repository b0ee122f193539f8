"""Transposed products: weights go from registers into the tensor cores, activations are their columns (SWAP_AB)."""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl

from moe_core.kernels.device.casts import INTERPRET
from moe_core.kernels.device.specialize import specialize
from moe_core.kernels.device.wait import wait_for_mma

# rows of activations up to which registers are left for the product of a step
FEW = tl.constexpr(32)
# up to Triton 3.7 a thread of `mma.sync` has four columns side by side of an operand that was joined from others
_FOUR_COLUMNS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8))


@triton.jit
def as_column(vector, SWAP_AB: tl.constexpr):
    """A vector along the rows of the result, shaped to multiply the tile."""
    return vector[None, :] if SWAP_AB else vector[:, None]


@triton.jit
def as_row(vector, SWAP_AB: tl.constexpr):
    """A vector along the columns of the result, shaped to multiply the tile."""
    return vector[:, None] if SWAP_AB else vector[None, :]


@triton.jit
def _by_thread(x):
    """`x` [rows, columns] with the columns that a thread of the tensor cores has of 16 side by side: 2t, 2t + 1, 2t + 8
    and 2t + 9 of its number t among four."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    return x.reshape(ROWS, COLUMNS // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, COLUMNS)


@triton.jit
def swap_ab_dot(values, x):
    """values [N, K] @ x [M, K].T, float32."""
    if INTERPRET or x.dtype == tl.float32:
        # the interpreter multiplies bfloat16 as if it were integers
        return tl.dot(values.to(tl.float32), tl.trans(x.to(tl.float32)), input_precision="ieee")
    # `wgmma` takes four warps, and for Triton up to 3.7 16 rows of activations
    elif _FOUR_COLUMNS and (x.shape[0] < 16 or tl.extra.cuda.num_warps() < 4):
        # in the same order both have the same product, and numbers stay in the registers that they were made in
        return tl.dot(_by_thread(values), tl.trans(_by_thread(x)))
    else:
        return tl.dot(values, tl.trans(x))


@triton.jit
def add_swap_ab_dot(acc, values, x):
    """acc + values [N, K] @ x [M, K].T"""
    if INTERPRET or x.dtype == tl.float32:
        return tl.dot(values.to(tl.float32), tl.trans(x.to(tl.float32)), acc, input_precision="ieee")
    elif acc.shape[1] <= FEW:
        # each step's product by itself: ptxas makes every `wgmma` wait for the one before where it cannot tell that
        # nobody else sets a running sum meanwhile (as `fma`: Triton would turn a sum into a running one)
        return tl.fma(swap_ab_dot(values, x), tl.full(acc.shape, 1.0, tl.float32), acc)
    else:
        return wait_for_mma(tl.dot(values, tl.trans(x), acc))


@cache
def uniform(multiply: Any) -> Any:
    """``multiply`` of a tile kernel, or its copy that sums alike for every height of a tile.

    Device functions read `FEW`.  In the copies no product of a step has registers of its own: the tensor cores' sum
    runs on.
    """
    read = multiply.fn.__code__.co_names
    if "FEW" in read:
        return specialize(multiply, FEW=0)
    if "add_swap_ab_dot" in read:
        return specialize(multiply, add_swap_ab_dot=specialize(add_swap_ab_dot, FEW=0))
    return multiply
