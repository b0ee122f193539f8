"""Transposed GEMMs (SWAP_AB): weights enter the tensor cores from registers.

Activations are the columns of these GEMMs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl

from moe_core.kernels.device.casts import INTERPRET
from moe_core.kernels.device.specialize import specialize
from moe_core.kernels.device.wait import wait_for_mma

# Activation rows up to which registers suffice for a separate partial sum per step.
FEW = tl.constexpr(32)
# Up to Triton 3.7, a thread of `mma.sync` holds four adjacent columns of an operand that was joined from others.
_FOUR_COLUMNS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8))


@triton.jit
def as_column(vector, SWAP_AB: tl.constexpr):
    """Shape a vector along the rows of the result to multiply the tile."""
    return vector[None, :] if SWAP_AB else vector[:, None]


@triton.jit
def as_row(vector, SWAP_AB: tl.constexpr):
    """Shape a vector along the columns of the result to multiply the tile."""
    return vector[:, None] if SWAP_AB else vector[None, :]


@triton.jit
def _by_thread(x):
    """`x` [rows, columns] with the columns that one tensor-core thread holds made adjacent.

    Of every 16 columns, thread t of four holds 2t, 2t + 1, 2t + 8 and 2t + 9.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    return x.reshape(ROWS, COLUMNS // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, COLUMNS)


@triton.jit
def swap_ab_dot(values, x):
    """values [N, K] @ x [M, K].T, float32."""
    if INTERPRET or x.dtype == tl.float32:
        # The interpreter multiplies bfloat16 as if it were integers.
        return tl.dot(values.to(tl.float32), tl.trans(x.to(tl.float32)), input_precision="ieee")
    # `wgmma` needs four warps and, up to Triton 3.7, 16 rows of activations.
    elif _FOUR_COLUMNS and (x.shape[0] < 16 or tl.extra.cuda.num_warps() < 4):
        # Reordering both operands keeps the product, and values stay in the registers where they were created.
        return tl.dot(_by_thread(values), tl.trans(_by_thread(x)))
    else:
        return tl.dot(values, tl.trans(x))


@triton.jit
def add_swap_ab_dot(acc, values, x):
    """acc + values [N, K] @ x [M, K].T."""
    if INTERPRET or x.dtype == tl.float32:
        return tl.dot(values.to(tl.float32), tl.trans(x.to(tl.float32)), acc, input_precision="ieee")
    elif acc.shape[1] <= FEW:
        # A separate partial sum per step: ptxas makes every `wgmma` wait for the one before unless it can prove
        # that nothing else writes a running sum meanwhile. Written as `fma`, because Triton would turn a sum
        # into a running one.
        return tl.fma(swap_ab_dot(values, x), tl.full(acc.shape, 1.0, tl.float32), acc)
    else:
        return wait_for_mma(tl.dot(values, tl.trans(x), acc))


@cache
def uniform(multiply: Any) -> Any:
    """Return a copy of a tile kernel's ``multiply`` that sums alike for every tile height.

    Device functions read `FEW`. In the copies, no step's partial sum has separate registers: the tensor cores' sum runs
    on.

    Args:
        multiply: Device function of the tile kernel.

    Returns:
        The copy, or ``multiply`` itself if it does not depend on the tile height.
    """
    read = multiply.fn.__code__.co_names
    if "FEW" in read:
        return specialize(multiply, FEW=0)
    if "add_swap_ab_dot" in read:
        return specialize(multiply, add_swap_ab_dot=specialize(add_swap_ab_dot, FEW=0))
    return multiply
