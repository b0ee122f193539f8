"""The split-K reduction of gemm1: the sum of the partial sums, then the epilogue: bias, activation, quantisation.

`quantize`, `quant_args`, `lora_args`, GROUPS and AMAX are those of `moe_core.gemm.tile_kernel`, for a tile of one row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.tile_kernel import mark_nan, store_amax
from moe_core.jit.activation import activate_gated, activate_plain
from moe_core.jit.casts import narrow
from moe_core.ops._sort_kernels import local_expert


@triton.jit
def _sum_partials(partials, columns, inside, stride, SPLIT_K: tl.constexpr):
    index = tl.arange(0, SPLIT_K)
    tile = tl.load(partials + index[:, None] * stride + columns[None, :], mask=inside[None, :], other=0.0)
    return tl.sum(tile, axis=0)


@triton.jit
def split_k_reduce_kernel(
    partials,
    ids,
    expert_map,
    bias,
    lora_args,
    out,
    out_scale,
    amax,
    quant_args,
    N,
    num_ids,
    num_experts,
    stride_partials,
    stride_out,
    stride_out_scale,
    stride_bias,
    alpha,
    beta,
    limit,
    quantize: tl.constexpr,
    SPLIT_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    AMAX: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """COLUMNS of one pair; partials [pairs * SPLIT_K, N or 2N] float32, grid (pairs, blocks of COLUMNS).

    Columns beyond N become zeros: rows of the result have room for whole blocks.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    expert = local_expert(ids, expert_map, pair, pair >= 0, num_ids, num_experts, HAS_MAP)
    if expert < 0:
        return
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < N
    first = partials + pair * SPLIT_K * stride_partials
    value = _sum_partials(first, columns, inside, stride_partials, SPLIT_K)
    if lora_args is not None:
        values, stride_lora, lora_ids = lora_args
        delta = values + pair * stride_lora
        some = tl.load(lora_ids + pair) >= 0
        value += tl.load(delta + columns, mask=inside & some, other=0.0).to(tl.float32)
    bias_row = bias
    if HAS_BIAS:
        bias_row += expert.to(tl.int64) * stride_bias
        value += tl.load(bias_row + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = _sum_partials(first + N, columns, inside, stride_partials, SPLIT_K)
        if lora_args is not None:
            up += tl.load(delta + N + columns, mask=inside & some, other=0.0).to(tl.float32)
        if HAS_BIAS:
            up += tl.load(bias_row + N + columns, mask=inside, other=0.0).to(tl.float32)
        value = activate_gated(value, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        value = activate_plain(value, limit, ACTIVATION, HAS_LIMIT)
    value = tl.where(inside, value, 0.0)
    value = value[None, :]
    row = out + pair * stride_out + columns[None, :]
    one = tl.arange(0, 1)
    if quantize is None:
        values = narrow(value, out.dtype.element_ty)
        if AMAX != "":
            store_amax(amax, values.to(tl.float32), pair + one, one == 0, inside[None, :], 1, AMAX)
        tl.store(row, values)
    else:
        if AMAX == "nan":
            mark_nan(amax, value, pair + one, inside[None, :], 1)
        values, scale = quantize(value, quant_args, expert, 1)
        tl.store(row, values)
        if out_scale is not None:
            scales = out_scale + pair * stride_out_scale + block * GROUPS
            if GROUPS == 1:
                tl.store(scales + one, scale)
            else:
                tl.store(scales + tl.arange(0, GROUPS)[None, :], scale)
