"""Kernel of `moe_core.kernels.ops.routing`: logits to experts and weights in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.pdl import begin_pdl
from moe_core.kernels.ops._exact_kernels import (
    divide,
    exp_nonpositive,
    ordered_float,
    ordered_int,
    sigmoid,
    sqrt_softplus,
    sum_pairwise,
    sum_unit_terms,
)

_RENORM_EPSILON = tl.constexpr(1e-20)
#: key below that of every number: an expert or group that does not exist or is already taken
_NONE = tl.constexpr(-2147483648)
#: low bits of a packed key, which hold the position; a 16-bit float leaves 13 of 32 bits free
_POSITION = tl.constexpr(0x1FFF)


@triton.jit
def _powers(logits):
    """Compute exp(l - max l) per row of [R, C]."""
    largest = tl.max(logits, axis=1, keep_dims=True)
    return exp_nonpositive(tl.where(logits == largest, 0.0, logits - largest))


@triton.jit
def _score(logits, SCORING: tl.constexpr):
    """Compute a score that depends on one logit only."""
    if SCORING == "sigmoid":
        return sigmoid(logits)
    elif SCORING == "sqrtsoftplus":
        return sqrt_softplus(logits)
    else:
        tl.static_assert(SCORING == "none", "unknown scoring function")
        return tl.where(logits == float("-inf"), 0.0, logits)


@triton.jit
def _take_best(keys, position):
    """Return the position [R, 1] of the largest key, and the keys without it.

    The lower position wins ties.
    """
    best = tl.max(keys, axis=1, keep_dims=True)
    where = tl.min(tl.where(keys == best, position, 0x7FFFFFFF), axis=1, keep_dims=True)
    return where, tl.where(position == where, _NONE, keys)


@triton.jit
def _keep_best_groups(keys, TOP2: tl.constexpr, GROUPS: tl.constexpr, TOPK_GROUP: tl.constexpr, BLOCK_G: tl.constexpr):
    """Remove the keys [R, BLOCK_G * S] of groups that are not among the best TOPK_GROUP."""
    rows: tl.constexpr = keys.shape[0]
    size: tl.constexpr = keys.shape[1] // BLOCK_G
    grouped = tl.reshape(keys, [rows, BLOCK_G, size])
    score = tl.max(grouped, axis=2)
    if TOP2:
        slot = tl.arange(0, size)[None, None, :]
        first = tl.min(tl.where(grouped == score[:, :, None], slot, size), axis=2)
        second = tl.max(tl.where(slot == first[:, :, None], _NONE, grouped), axis=2)
        both = ordered_float(score) + ordered_float(second)
        score = ordered_int(tl.where(both == both, both, float("-inf")))
    group = tl.arange(0, BLOCK_G)[None, :]
    score = tl.where(group < GROUPS, score, _NONE)
    kept = tl.zeros([rows, BLOCK_G], dtype=tl.int32)
    for _ in tl.static_range(TOPK_GROUP):
        best, score = _take_best(score, group)
        kept = tl.where(group == best, 1, kept)
    return tl.reshape(tl.where(kept[:, :, None] != 0, grouped, _NONE), [rows, BLOCK_G * size])


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    logits,
    bias,
    weights,
    ids,
    tokens,
    stride_token,
    stride_expert,
    scale,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SELECTED_ONLY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute weights and expert ids [M, TOP_K] of logits [M, EXPERTS].

    Weights are float32, ids int32; see `moe_core.spec.routing`. A tile holds ROWS tokens and, per token, BLOCK_G groups
    of BLOCK_S slots (powers of two; a padded slot has no expert). PACK: the logits have 16 bits and alone determine the
    choice, so that key and position fit one integer.
    """
    begin_pdl(PDL)
    group_size: tl.constexpr = EXPERTS // GROUPS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    position = tl.arange(0, BLOCK_G * BLOCK_S)[None, :]
    expert = (position // BLOCK_S) * group_size + position % BLOCK_S
    exists = (position % BLOCK_S < group_size) & (expert < EXPERTS) & (row < tokens)
    pointers = logits + row * stride_token
    values = tl.load(pointers + expert * stride_expert, mask=exists, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("-inf"))

    # a softmax before top-k covers the whole row
    full_softmax: tl.constexpr = SCORING == "softmax" and not SELECTED_ONLY
    if full_softmax:
        largest = tl.max(values, axis=1, keep_dims=True)
        powers = exp_nonpositive(tl.where(values == largest, 0.0, values - largest))
        total = sum_unit_terms(tl.where(exists, powers, 0.0))
    choice = values
    if HAS_BIAS:
        offset = tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
        if full_softmax:
            choice = divide(powers, total) + offset
        else:
            choice = _score(values, SCORING) + offset
        choice = tl.where((choice == choice) & (values > float("-inf")), choice, float("-inf"))
    keys = ordered_int(choice)
    if PACK:
        keys = (keys & ~_POSITION) | (_POSITION - position)
    keys = tl.where(exists, keys, _NONE)
    if GROUPS > 1:
        keys = _keep_best_groups(keys, HAS_BIAS and group_size > 1, GROUPS, TOPK_GROUP, BLOCK_G)

    column = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros([ROWS, BLOCK_K], dtype=tl.int32)
    for j in range(TOP_K):
        if PACK:
            best = tl.max(keys, axis=1, keep_dims=True)
            keys = tl.where(keys == best, _NONE, keys)
            best = _POSITION - (best & _POSITION)
        else:
            best, keys = _take_best(keys, position)
        chosen = tl.where(column == j, best, chosen)
    # rows past the end of the batch have no valid choice; keep their loads in bounds
    chosen = (chosen // BLOCK_S) * group_size + chosen % BLOCK_S
    stored = (column < TOP_K) & (row < tokens)

    selected = tl.load(pointers + chosen * stride_expert, mask=stored, other=float("-inf")).to(tl.float32)
    selected = tl.where(selected == selected, selected, float("-inf"))
    if full_softmax:
        weight = exp_nonpositive(tl.where(selected == largest, 0.0, selected - largest))
        weight = divide(weight, total)
    elif SCORING == "softmax":
        weight = tl.where(stored, _powers(selected), 0.0)
        weight = divide(weight, sum_pairwise(weight))
    else:
        weight = _score(selected, SCORING)
    if RENORMALIZE and not SELECTED_ONLY:
        weight = tl.where(stored, weight, 0.0)
        weight = divide(weight, sum_pairwise(weight) + _RENORM_EPSILON)
    weight = weight * scale
    place = row * TOP_K + column
    tl.store(weights + place, weight, mask=stored)
    tl.store(ids + place, chosen, mask=stored)
