"""How tiles of the family are loaded, multiplied and scaled; what the tile kernel's functions are made of.

    weights       int32 words [E, rows, words of K], see `moe_core.gemm.marlin.words`
    scales        float32 [E, groups of K, rows]; beside zero points int32: the bits of a float32 whose last nine are 0,
                  and the zero point in their place.  Four bytes, so that they too are copied ahead of time.
    channel scales   float32 [E, rows] that multiply finished sums, or None
    activations   bfloat16, float16 or float32 [rows, K]

Operands are always swapped (SWAP_AB): weights go from registers into the tensor cores or, beside float32 activations,
into float32 multiplications.  Scales are applied

- to the finished sum, where a row has one (`open_rows`, `scale_acc_rows`);
- to the sum of each step in float32, where a step is one group (`load_step`, `add_scaled_product`), which is exact and
  costs little beside few tokens;
- to the numbers, rounded to the activations' type, otherwise (`load_groups`): half an instruction more for each number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.weight_tile import weight_rows, weight_tile
from moe_core.jit.casts import INTERPRET, narrow
from moe_core.jit.wait import wait_for_mma

#: columns of a step
STEP = tl.constexpr(128)
# rows of activations up to which registers are left for the product of a step
FEW = tl.constexpr(32)


@triton.jit
def open_activations(a_args, rows, expert):
    """a_args = (values, row stride, columns)."""
    values, stride, columns = a_args
    return values + rows * stride, columns


@triton.jit
def load_activations(state, k, BLOCK_K: tl.constexpr):
    """Tile [BLOCK_M, BLOCK_K]."""
    values, columns = state
    column = k * BLOCK_K + tl.arange(0, BLOCK_K)
    return tl.load(values[:, None] + column[None, :], mask=(column < columns)[None, :], other=0.0), 0.0


@triton.jit
def load_padded(state, k, BLOCK_K: tl.constexpr):
    """As `load_activations`, of rows that are padded to whole steps."""
    values, _ = state
    return tl.load(values[:, None] + (k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]), 0.0


@triton.jit
def open_indexed(a_args, rows, expert):
    """a_args = (values, row stride, columns, index [E, columns], stride, pre_scales [E, K] or None, stride)."""
    values, stride, columns, index, stride_index, pre_scales, stride_pre = a_args
    base = expert.to(tl.int64)
    if pre_scales is None:
        return values + rows * stride, columns, index + base * stride_index
    else:
        return values + rows * stride, columns, index + base * stride_index, pre_scales + base * stride_pre


@triton.jit
def load_indexed(state, k, BLOCK_K: tl.constexpr):
    """Tile [BLOCK_M, BLOCK_K] of the columns that `index` names (-1: zeros), times their pre_scales."""
    column = k * BLOCK_K + tl.arange(0, BLOCK_K)
    source = tl.load(state[2] + column, mask=column < state[1], other=-1)
    some = source >= 0
    tile = tl.load(state[0][:, None] + source[None, :], mask=some[None, :], other=0.0)
    if len(state) == 4:
        factor = tl.load(state[3] + source, mask=some, other=0.0)
        tile = narrow(tile.to(tl.float32) * factor[None, :], tile.dtype)
    return tile, 0.0


@triton.jit
def open_groups(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """State of a tile: pointers to the rows' scales.

    b_args = (words, scales, channel scales or None, strides of the words' experts and rows, of the scales' experts and
    groups, of the channel_scales' experts, number of groups).
    """
    words, scales, channel_scales, stride_e, stride_n, scale_e, scale_g, channel_e, groups = b_args
    rows, inside, first = weight_rows(words, stride_e, stride_n, expert, half, n, N, BLOCK_N)
    columns = half * N + n + tl.arange(0, BLOCK_N)
    scale = scales + expert.to(tl.int64) * scale_e + columns
    # a state holds no None: without channel_scales, anything
    factor = scale if channel_scales is None else channel_scales + expert.to(tl.int64) * channel_e + columns
    return rows, inside, first, scale, scale_g, groups, factor


@triton.jit
def open_rows(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """As `open_groups`, with the scales of rows that have one each."""
    rows, inside, first, scale, scale_g, groups, factor = open_groups(b_args, expert, half, n, N, BLOCK_N)
    return rows, inside, first, tl.load(scale, mask=inside, other=0), scale_g, groups, factor


@triton.jit
def tile_words(state, b_desc, k, K, BLOCK_K: tl.constexpr, BITS: tl.constexpr, EVEN_N: tl.constexpr):
    """int32 [BLOCK_N, words] of step k; rows have whole steps."""
    size = tl.cdiv(K, STEP) * (STEP * BITS // 32)
    return weight_tile(state[0], state[1], state[2], b_desc, k, size, BLOCK_K * BITS // 32, EVEN_N, True)


@triton.jit
def load_step(state, group, EVEN_N: tl.constexpr):
    """Scales [BLOCK_N] of one group."""
    # the last step may have columns of no group, whose activations are zeros
    pointers = state[3] + tl.minimum(group, state[5] - 1) * state[4]
    if EVEN_N:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=state[1], other=0)


@triton.jit
def load_groups(state, k, GROUPS: tl.constexpr, EVEN_N: tl.constexpr):
    """Scales [BLOCK_N, GROUPS] of step k, which has 1, 2 or 4 groups."""
    tl.static_assert(GROUPS == 1 or GROUPS == 2 or GROUPS == 4, "a step has 1, 2 or 4 groups")
    scale_0 = load_step(state, k * GROUPS, EVEN_N)
    if GROUPS == 1:
        return scale_0[:, None]
    else:
        scale_1 = load_step(state, k * GROUPS + 1, EVEN_N)
        if GROUPS == 2:
            return tl.join(scale_0, scale_1)
        else:
            scale_2 = load_step(state, k * GROUPS + 2, EVEN_N)
            scale_3 = load_step(state, k * GROUPS + 3, EVEN_N)
            return tl.join(tl.join(scale_0, scale_2), tl.join(scale_1, scale_3)).reshape(scale_0.shape[0], 4)


@triton.jit
def scale_of(scales):
    """float32 of loaded scales."""
    if scales.dtype == tl.int32:
        return (scales & -512).to(tl.float32, bitcast=True)
    else:
        return scales


@triton.jit
def zero_of(scales):
    """Zero points, float32, of loaded scales that have them."""
    return (scales & 511).to(tl.float32)


@triton.jit
def per_word(groups, W: tl.constexpr, UNITS: tl.constexpr):
    """[N, G] values of a step's groups as [N, W] of its words.

    A step has UNITS units of 4 threads x 4 words; what is joined and reshaped rather than indexed takes the layout of
    the tensor cores' operand, so that words go there without a detour through shared memory.
    """
    N: tl.constexpr = groups.shape[0]
    G: tl.constexpr = groups.shape[1]
    tl.static_assert(W == UNITS * 16)
    if UNITS == 1:
        spread = tl.broadcast_to(groups[:, None, :, None], (N, 4, G, 4 // G))
    else:
        tl.static_assert(UNITS == 2, "a step has one or two units")
        if G == 1:
            spread = tl.broadcast_to(groups[:, :, None], (N, 1, W))
        else:
            halves = groups.reshape(N, 2, G // 2)
            spread = tl.broadcast_to(halves[:, :, None, :, None], (N, 2, 4, G // 2, 8 // G))
    return spread.reshape(N, W)


@triton.jit
def step_bytes(words):
    """[N, 4] of the bytes of `words` int32 [N]."""
    # joined and reshaped rather than indexed, see `per_word`
    even = tl.join(words & 0xFF, (words >> 16) & 0xFF)
    odd = tl.join((words >> 8) & 0xFF, (words >> 24) & 0xFF)
    return tl.join(even, odd).reshape(words.shape[0], 4)


@triton.jit
def step_powers(words, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """Scales [N, 4] of a step's groups of 32 columns, of `words` int32 [N] that hold a byte for each.

    A byte is LARGEST plus the exponent of a scale that is at most 1.  The result is a pair of `dtype` numbers in int32:
    for bfloat16 the byte is the exponent's field, float16 has it less 224.  For float32, and in the interpreter, it is
    the scale.
    """
    exponents = step_bytes(words)
    if INTERPRET or dtype == tl.float32:
        return (exponents << 23).to(tl.float32, bitcast=True) * 2.0 ** (127 - LARGEST)
    elif dtype == tl.float16:
        # what is 2^-23 and less of the largest becomes 0
        return tl.maximum(exponents - 224, 0) * 0x04000400
    else:
        return exponents * 0x00800080


@triton.jit
def add_product(acc, numbers, x, STEPWISE: tl.constexpr):
    """acc [N, M] + numbers [N, K] @ x [M, K].T; STEPWISE: the step's product by itself, then added.

    ptxas makes every `wgmma` wait for the one before where it cannot tell that nobody else sets a running sum
    meanwhile; a step's own product has none.  (As `fma`: Triton would turn a sum into a running one.)
    """
    if INTERPRET or x.dtype == tl.float32:
        # the interpreter multiplies bfloat16 as if it were integers
        return tl.dot(numbers, tl.trans(x.to(tl.float32)), acc, input_precision="ieee")
    elif STEPWISE:
        step = tl.dot(numbers, tl.trans(x))
        return tl.fma(step, tl.full(acc.shape, 1.0, tl.float32), acc)
    else:
        return wait_for_mma(tl.dot(numbers, tl.trans(x), acc))


@triton.jit
def add_scaled_product(acc, numbers, x, scale):
    """acc [N, M] + (numbers [N, K] @ x [M, K].T) * scale [N]."""
    if INTERPRET or x.dtype == tl.float32:
        return acc + tl.dot(numbers, tl.trans(x.to(tl.float32)), input_precision="ieee") * scale[:, None]
    else:
        return acc + tl.dot(numbers, tl.trans(x)) * scale[:, None]


@triton.jit
def scale_acc_rows(acc, a_state, b_state, SWAP_AB: tl.constexpr):
    """acc times the scale of each row."""
    return acc * scale_of(b_state[3])[:, None]


@triton.jit
def scale_acc_channels(acc, a_state, b_state, SWAP_AB: tl.constexpr):
    """acc times the factor of each row."""
    return acc * tl.load(b_state[6], mask=b_state[1], other=0.0)[:, None]
