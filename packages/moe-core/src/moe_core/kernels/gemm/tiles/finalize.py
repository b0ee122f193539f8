"""Epilogue of a gemm2 whose programs hold all pairs of a token.

It adds the bias, applies router weights and sums over the pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.casts import downcast


@triton.jit
def finalize_pairs(acc, epilogue, result, N, expert, exists, pair, token, columns):
    """Store out[token] = sum over its pairs of weight * (acc + bias).

    `acc` is float32 [pairs, columns]. `expert` [pairs] is 0 for a pair without a local expert. Such a pair does not
    `exist`: its sums are undefined and add nothing.
    """
    inside = columns < N
    if epilogue.bias is not None:
        bias = (epilogue.bias + expert.to(tl.int64) * epilogue.stride_bias)[:, None] + columns[None, :]
        acc += tl.load(bias, mask=inside[None, :], other=0.0).to(tl.float32)
    if epilogue.weights is not None:
        acc = acc * tl.load(epilogue.weights + pair)[:, None]
    total = tl.sum(tl.where(exists[:, None], acc, 0.0), axis=0)
    tl.store(result.out + token * result.stride + columns, downcast(total, result.out.dtype.element_ty), mask=inside)


@triton.jit
def store_zeros(result, N, token, columns):
    """Store out[token] = 0 for a token none of whose pairs has a local expert.

    This does not wait for the previous launch (`moe_core.kernels.device.pdl`), which writes no result and reads nothing
    of such a token. All launches before that one have completed.
    """
    # Zeros in the layout of the columns.
    zeros = (columns * 0).to(result.out.dtype.element_ty)
    tl.store(result.out + token * result.stride + columns, zeros, mask=columns < N)
