"""The end of a gemm2 whose programs have all pairs of a token: bias, router weights and the sum over the pairs."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.casts import downcast


@triton.jit
def finalize_pairs(acc, epilogue, result, N, expert, exists, pair, token, columns):
    """out[token] = sum over its pairs of weight * (acc + bias), from `acc` [pairs, columns] to the stores; float32.

    `expert` [pairs], 0 of a pair that has none here: what does not `exist`, whose sums may be anything, adds nothing.
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
    """out[token] = 0: no pair of the token has an expert here.

    Needs no wait for the launch before (`moe_core.kernels.device.pdl`), which writes no result and reads nothing of
    such a token; all launches before that one have ended.
    """
    # of the columns' layout
    zeros = (columns * 0).to(result.out.dtype.element_ty)
    tl.store(result.out + token * result.stride + columns, zeros, mask=columns < N)
