"""Matrix-vector products for very few tokens: every (token, slot) pair streams its expert's weights by itself.

With one token there is nothing to share between rows, so matrix units (at least 64 x 8) and sorting only cost time;
what counts is that all multiprocessors read weights at once.  A tile is a few rows of one expert by BLOCK_K columns,
multiplied in float32 on the ordinary units.  A scheme passes

    quantize(tile [G, GROUP] float32, AXIS)                           -> values, scale [G]
    products(B, expert, half, n, k, values, scale, N, K, ROWS, G, GROUP)  -> [ROWS, G * GROUP] float32

where `values` are the quantised activations as float32 and `k` is the first column of the step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.epilogue import activate_gated, activate_plain
from moe_core.gemm.narrow import narrow
from moe_core.ops._sort_kernels import local_expert


@triton.jit
def _load_quantized(x, k, K, quantize: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr):
    """Columns k .. k + G * GROUP of the row at x, quantised by groups: values [G, GROUP] float32, scale [G]."""
    offset = k + tl.arange(0, G)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tile = tl.load(x + offset, mask=offset < K, other=0.0).to(tl.float32)
    values, scale = quantize(tile, 1)
    return values.to(tl.float32), scale


@triton.jit
def vector_up_kernel(
    x,
    B,
    ids,
    expert_map,
    bias,
    weights,
    out,
    N,
    K,
    top_k,
    num_ids,
    num_experts,
    stride_x,
    stride_out,
    stride_bias,
    alpha,
    beta,
    limit,
    quantize: tl.constexpr,
    products: tl.constexpr,
    ROWS: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    WEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair, n] = act(w13[expert] @ x[token]) in float32; grid (pairs, ceil(N / ROWS))."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0)
    expert = local_expert(ids, expert_map, pair, pair >= 0, num_ids, num_experts, HAS_MAP)
    if expert < 0:
        return
    n = tl.program_id(1) * ROWS
    row = x + (pair // top_k).to(tl.int64) * stride_x
    acc = tl.zeros((ROWS, G * GROUP), dtype=tl.float32)
    acc_up = tl.zeros((ROWS, G * GROUP), dtype=tl.float32)
    for step in tl.range(0, tl.cdiv(K, G * GROUP), num_stages=STAGES):
        k = step * G * GROUP
        values, scale = _load_quantized(row, k, K, quantize, G, GROUP)
        acc += products(B, expert, 0, n, k, values, scale, N, K, ROWS, G, GROUP)
        if GATED:
            acc_up += products(B, expert, 1, n, k, values, scale, N, K, ROWS, G, GROUP)
    result = tl.sum(acc, axis=1)
    columns = n + tl.arange(0, ROWS)
    inside = columns < N
    if WEIGHT:
        result *= tl.load(weights + pair)
    if HAS_BIAS:
        result += tl.load(bias + expert.to(tl.int64) * stride_bias + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(acc_up, axis=1)
        if WEIGHT:
            up *= tl.load(weights + pair)
        if HAS_BIAS:
            up += tl.load(bias + expert.to(tl.int64) * stride_bias + N + columns, mask=inside, other=0.0).to(tl.float32)
        result = activate_gated(result, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        result = activate_plain(result, limit, ACTIVATION, HAS_LIMIT)
    tl.store(out + pair.to(tl.int64) * stride_out + columns, result, mask=inside)


@triton.jit
def vector_down_kernel(
    h,
    B,
    ids,
    expert_map,
    bias,
    weights,
    out,
    N,
    K,
    num_ids,
    num_experts,
    stride_h,
    stride_out,
    stride_bias,
    quantize: tl.constexpr,
    products: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    WEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[token, n] = sum over slots of weight * (w2[expert] @ h[pair]); grid (tokens, ceil(N / ROWS)).

    Here N is the number of rows of w2 (the hidden size) and K the intermediate size.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    n = tl.program_id(1) * ROWS
    columns = n + tl.arange(0, ROWS)
    inside = columns < N
    acc = tl.zeros((ROWS, G * GROUP), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    steps = tl.cdiv(K, G * GROUP)
    for index in tl.range(0, steps * TOP_K, num_stages=STAGES):
        pair = token * TOP_K + index // steps
        k = (index % steps) * G * GROUP
        expert = local_expert(ids, expert_map, pair, pair >= 0, num_ids, num_experts, HAS_MAP)
        # a dropped pair has no columns: all its loads are masked
        end = tl.where(expert >= 0, K, 0)
        values, scale = _load_quantized(h + pair.to(tl.int64) * stride_h, k, end, quantize, G, GROUP)
        if WEIGHT:
            scale *= tl.load(weights + pair)
        acc += products(B, expert, 0, n, k, values, scale, N, end, ROWS, G, GROUP)
    if HAS_BIAS:
        for j in tl.static_range(TOP_K):
            pair = token * TOP_K + j
            expert = local_expert(ids, expert_map, pair, pair >= 0, num_ids, num_experts, HAS_MAP)
            end = tl.where(expert >= 0, N, 0)
            add = tl.load(bias + expert.to(tl.int64) * stride_bias + columns, mask=columns < end, other=0.0)
            add = add.to(tl.float32)
            if WEIGHT:
                add *= tl.load(weights + pair)
            total += add
    total += tl.sum(acc, axis=1)
    tl.store(out + token.to(tl.int64) * stride_out + columns, narrow(total, out.dtype.element_ty), mask=inside)
