"""Finish an up product whose k loop was split: add the parts, bias, activation, quantisation."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.epilogue import activate_gated, activate_plain
from moe_core.ops._sort_kernels import local_expert


@triton.jit
def _sum_parts(parts, columns, inside, stride, SPLIT: tl.constexpr, GROUP: tl.constexpr):
    index = tl.arange(0, SPLIT)
    tile = tl.load(parts + index[:, None] * stride + columns[None, :], mask=inside[None, :], other=0.0)
    return tl.sum(tile, axis=0)


@triton.jit
def combine_kernel(
    parts,
    ids,
    expert_map,
    bias,
    out,
    out_scale,
    N,
    num_ids,
    num_experts,
    stride_parts,
    stride_out,
    stride_out_scale,
    stride_bias,
    alpha,
    beta,
    limit,
    quantize: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One quantisation group of one pair; parts [pairs * SPLIT, N or 2N] float32, grid (pairs, groups)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    expert = local_expert(ids, expert_map, pair, pair >= 0, num_ids, num_experts, HAS_MAP)
    if expert < 0:
        return
    columns = group * GROUP + tl.arange(0, GROUP)
    inside = columns < N
    first = parts + pair * SPLIT * stride_parts
    value = _sum_parts(first, columns, inside, stride_parts, SPLIT, GROUP)
    bias_row = bias
    if HAS_BIAS:
        bias_row += expert.to(tl.int64) * stride_bias
        value += tl.load(bias_row + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = _sum_parts(first + N, columns, inside, stride_parts, SPLIT, GROUP)
        if HAS_BIAS:
            up += tl.load(bias_row + N + columns, mask=inside, other=0.0).to(tl.float32)
        value = activate_gated(value, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        value = activate_plain(value, limit, ACTIVATION, HAS_LIMIT)
    value = tl.where(inside, value, 0.0)
    values, scale = quantize(value[None, :], 1)
    tl.store(out + pair * stride_out + columns[None, :], values)
    tl.store(out_scale + pair * stride_out_scale + group + tl.arange(0, 1), scale)
