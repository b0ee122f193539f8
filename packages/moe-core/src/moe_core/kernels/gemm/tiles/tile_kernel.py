"""The grouped GEMM: one program computes one tile of one expert.

    out[row, n] = epilogue( sum_k a[row, k] * b[expert(row), n, k] )

The kernel implements what every scheme shares: the order of tiles, the pipelined loop over k, the gate and up halves,
bias, activation, quantization of the result and router weights. A scheme passes `@triton.jit` functions:

    open_a(a_args, rows, expert)                                -> state of a row tile, created once
    load_a(state, k, BLOCK_K)                                   -> tile [BLOCK_M, BLOCK_K], scale
    open_b(b_args, expert, half, n, N, BLOCK_N)                 -> state of a weight tile, created once per half
    load_b(state, b_desc, k, K, BLOCK_K, EVEN_N, EVEN_K)        -> tile [BLOCK_N, BLOCK_K], scale
    multiply(acc, a, a_scale, b, b_scale, SWAP_AB)              -> acc
    scale_acc(acc, a_state, b_state, SWAP_AB)                   -> acc, once after the loop, where scales do not change
                                                                   along k; may be None
    quantize(tile, quant_args, expert, AXIS)                    -> values, scale of the result; None to store it as is

`rows` [BLOCK_M] int64 are rows of operand A, `expert` is the tile's local expert, `k` counts blocks of BLOCK_K, `n` is
the first column of the tile, and `half` is 0 for gate (or the only half) and 1 for up. States are tuples. A scale is
any value that the scheme's `multiply` understands (0.0 if there is none). `open_b` must read only weights and their
scales, because it runs before the kernel that produces A has completed. `open_a` may read anything.

`quantize` receives a float32 tile and the scheme's arguments `quant_args` (None if there are none), for example a
pointer to a static scale per expert. It returns the tile's values and the scales to store. AXIS, the tile's columns, is
reduced to one scale or to `groups` adjacent ones: shape [rows] for one, otherwise [rows, groups] for AXIS 1 and
[groups, rows] for AXIS 0. Without `scales` (static ones) the second value is ignored.

Functions of the same form quantize rows of x, on tiles [groups, columns] with AXIS 1. They are called by

- `moe_core.kernels.ops.batch`, with `expert` [groups, 1]
- `moe_core.kernels.gemm.tiles.quantize_rows`, with `expert` [groups, 1], or 0 if no expert matters
- `moe_core.kernels.ops.sort`, where rows are tokens, with the token's index [groups, 1] in place of the expert

The warp-specialized kernel of 8-bit weights passes tiles [rows, groups, columns] with AXIS 2, for one scale each.

A result that is stored unquantized may leave its largest magnitude in `amax`, as the bits of a non-negative float32 in
int32 (NaN compares above infinity). `amax_kind` "row" takes one per row of the result, "tensor" one over all finite
values. The caller has zeroed `amax` in an earlier launch (`sort_pairs(zero=)`). The next GEMM's `load_a` can then
quantize on load. `amax_kind` "nan" is for a `quantize` whose codes cannot represent NaN: rows that contain a NaN
receive its bits, other rows are not written.

SWAP_AB computes the transposed tile [BLOCK_N, BLOCK_M], weights first. The MMA needs at least 64 rows but takes as few
as 8 columns, so that few tokens waste nothing.

INTERLEAVED: gate and up rows of the weights alternate in blocks of 8, each half padded to whole blocks. The MMA leaves
a row and the eighth row after it in one thread, so that a tile has gate and up of the same columns in the same
registers. Otherwise a gated tile has two accumulators (DUAL), each of which reads its half of the weights.

SPLIT_K programs share the mainloop of one tile, where the tiles alone do not fill all SMs. Each stores float32 partial
sums by pair, [pair * SPLIT_K + k_part, columns]. The next launch adds them; for gemm1 that is `split_k_reduce_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.activation import activate
from moe_core.kernels.device.casts import downcast
from moe_core.kernels.device.pdl import begin_pdl, wait_at_first
from moe_core.kernels.gemm.tiles.schedule import expert_of, locate, tile_of
from moe_core.kernels.gemm.tiles.swap_ab import as_column, as_row
from moe_core.kernels.ops._quantize_kernels import finite_bits, magnitude_bits


@triton.jit
def _bias(row, columns, inside, SWAP_AB: tl.constexpr):
    """Bias of the tile's columns, shaped to be added to the tile."""
    return as_row(tl.load(row + columns, mask=inside, other=0.0).to(tl.float32), SWAP_AB)


@triton.jit
def _deltas(lora, pair, columns, mask, SWAP_AB: tl.constexpr):
    """LoRA deltas of a tile, float32.

    lora: a `LoRADelta` of `moe_core.kernels.gemm.tiles.launch`.
    """
    values, stride, ids = lora
    some = tl.load(ids + pair) >= 0
    offsets = as_column(pair * stride, SWAP_AB) + as_row(columns, SWAP_AB)
    return tl.load(values + offsets, mask=mask & as_column(some, SWAP_AB), other=0.0).to(tl.float32)


@triton.jit
def deinterleave(acc, SWAP_AB: tl.constexpr):
    """Gate and up of an interleaved tile, in registers."""
    tl.static_assert(SWAP_AB, "interleaved weights are the rows of a transposed tile")
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    gate, up = acc.reshape(ROWS // 16, 2, 8, COLUMNS).permute(0, 2, 3, 1).split()
    return gate.reshape(ROWS // 2, COLUMNS), up.reshape(ROWS // 2, COLUMNS)


@triton.jit
def _store_amax(amax, value, target, row_mask, value_mask, AXIS: tl.constexpr, AMAX: tl.constexpr):
    """Raise `amax` to the largest magnitude of float32 `value`.

    One per row (AXIS: columns), or one over all finite values.
    """
    bits = tl.where(value_mask, magnitude_bits(value) if AMAX == "row" else finite_bits(value), 0)
    if AMAX == "row":
        tl.atomic_max(amax + target, tl.max(bits, axis=AXIS), mask=row_mask, sem="relaxed")
    else:
        tl.static_assert(AMAX == "tensor", "amax is per row or tensor")
        # Flat: Triton 3.6 cannot lay out one reduction after another for sm_100.
        tl.atomic_max(amax, tl.max(bits), sem="relaxed")


@triton.jit
def _flag_nan(nan_flags, value, target, value_mask, AXIS: tl.constexpr):
    """Write the bits of NaN for the rows `target` of `value` that contain one.

    Each NaN is stored separately: usually there are none, and reducing whole rows first would cost more.
    """
    pointers = nan_flags + tl.expand_dims(target, AXIS) + tl.zeros(value.shape, tl.int32)
    tl.store(pointers, 0x7FC00000, mask=value_mask & (value != value))


@triton.jit
def _rows(position, pair, top_k, WHICH: tl.constexpr):
    """The row of an operand or of the result that a tile row refers to.

    "position" is the sorted order.
    """
    if WHICH == "position":
        return position
    elif WHICH == "token":
        return pair // top_k
    else:
        tl.static_assert(WHICH == "pair", "a row of the tile is a position, a token or a pair")
        return pair


@triton.jit
def finish_values(
    acc,
    up,
    epilogue,
    N,
    expert,
    pair,
    columns,
    stored,
    activate: tl.constexpr,
    SWAP_AB: tl.constexpr,
    EVEN_N: tl.constexpr,
    weight=None,
):
    """Apply LoRA deltas, router weights, bias and activation to the float32 sum `acc`.

    `up`: the second sum if gated; `pair`: of each row; `columns`: of the tile; `stored`: mask of existing elements;
    `activate`: see `moe_core.kernels.device.activation`; `weight`: router weights loaded earlier, shaped to multiply
    the tile.
    """
    GEMM1: tl.constexpr = epilogue.activation != ""
    inside = columns < N
    if epilogue.lora is not None:
        acc += _deltas(epilogue.lora, pair, columns, stored, SWAP_AB)
        if epilogue.gated:
            up += _deltas(epilogue.lora, pair, N + columns, stored, SWAP_AB)
    if epilogue.weights is not None:
        if weight is None:
            weight = as_column(tl.load(epilogue.weights + pair), SWAP_AB)
        if GEMM1:
            acc = acc * weight
            up = up * weight
    if epilogue.bias is not None:
        bias = epilogue.bias + expert.to(tl.int64) * epilogue.stride_bias
        acc += _bias(bias, columns, inside, SWAP_AB)
        if epilogue.gated:
            up += _bias(bias + N, columns, inside, SWAP_AB)
    if GEMM1:
        acc = activate(acc, up, epilogue)
        # Rows of h have space for whole tiles. Columns beyond N become zeros, so that gemm2 may read them.
        if not EVEN_N:
            acc = tl.where(as_row(inside, SWAP_AB), acc, 0.0)
    elif epilogue.weights is not None:
        acc = acc * weight
    return acc


@triton.jit
def finish_tile(
    acc,
    up,
    epilogue,
    result,
    N,
    expert,
    pair,
    target,
    mask,
    block,
    columns,
    SWAP_AB: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    """Run the epilogue of column block `block`, from the sum to the stores.

    `acc` (and `up`, if gated) is float32. `target` [BLOCK_M]: rows of the result, of which `mask` exist. `EVEN_N`:
    there are no columns beyond N.
    """
    GEMM1: tl.constexpr = epilogue.activation != ""
    AXIS: tl.constexpr = 0 if SWAP_AB else 1
    stored = as_column(mask, SWAP_AB) & as_row(columns < N, SWAP_AB)
    acc = finish_values(acc, up, epilogue, N, expert, pair, columns, stored, activate, SWAP_AB, EVEN_N)
    if GEMM1:
        stored = as_column(mask, SWAP_AB)
    pointers = result.out + as_column(target * result.stride, SWAP_AB) + as_row(columns, SWAP_AB)
    if result.quantize is None:
        values = downcast(acc, result.out.dtype.element_ty)
        if result.amax_kind != "":
            _store_amax(result.amax, values.to(tl.float32), target, mask, stored, AXIS, result.amax_kind)
        tl.store(pointers, values, mask=stored)
    else:
        if result.amax_kind == "nan":
            _flag_nan(result.amax, acc, target, stored, AXIS)
        values, scale = result.quantize(acc, result.quant_args, expert, AXIS)
        tl.store(pointers, values, mask=stored)
        if result.scales is not None:
            GROUPS: tl.constexpr = result.groups
            scales = target * result.stride_scales + block * GROUPS
            if GROUPS == 1:
                tl.store(result.scales + scales, scale, mask=mask)
            else:
                group = tl.arange(0, GROUPS)
                pointers = result.scales + as_column(scales, SWAP_AB) + as_row(group, SWAP_AB)
                tl.store(pointers, scale, mask=as_column(mask, SWAP_AB))


@triton.jit
def grouped_gemm_kernel(
    result,
    a_args,
    b_args,
    b_desc,
    schedule,
    epilogue,
    functions,
    N,
    K,
    top_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    A_ROWS: tl.constexpr,
    OUT_ROWS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SUBTILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one tile per program; programs beyond the last tile return at once.

    - result, epilogue, functions: `Result`, `Epilogue` and `TileFunctions` of `moe_core.kernels.gemm.tiles.launch`
    - schedule: see `moe_core.kernels.gemm.tiles.schedule`
    - N: columns of the result (of one half if gated)
    - A_ROWS and OUT_ROWS: the row of A and of the result that a tile row refers to, see `_rows`
    - SPLIT_K > 1: gemm1 stores its halves next to each other, [gate N | up N], without epilogue
    """
    GEMM1: tl.constexpr = epilogue.activation != ""
    # gemm2: the previous kernel (gemm1, or one that quantizes, gathers or reduces h) has waited for the sort and
    # everything that depended on it. So schedule and weights may be read before that kernel has completed.
    if PDL and GEMM1:
        tl.extra.cuda.gdc_wait()
    # Weight rows that a tile may have: of one half, or of both if interleaved.
    rows = tl.cdiv(N, 8) * 16 if INTERLEAVED else N
    blocks_n = tl.cdiv(rows, BLOCK_N)
    subtiles = tl.load(schedule[0]) * SUBTILES
    pid = tl.program_id(0)
    if pid >= subtiles * blocks_n * SPLIT_K:
        wait_at_first(PDL and not GEMM1)
        return
    k_part = pid % SPLIT_K
    subtile, block_n = tile_of(pid // SPLIT_K, subtiles, blocks_n, GROUP_M)
    expert, position, pair, mask = locate(schedule, subtile, BLOCK_M, SUBTILES)
    if SUBTILES > 1 and tl.sum(mask.to(tl.int32), axis=0) == 0:
        return  # never program 0, which waits for all: the first subtile of a tile has rows
    n = block_n * BLOCK_N

    SHAPE_0: tl.constexpr = BLOCK_N if SWAP_AB else BLOCK_M
    SHAPE_1: tl.constexpr = BLOCK_M if SWAP_AB else BLOCK_N
    acc = tl.zeros((SHAPE_0, SHAPE_1), dtype=functions.accumulate)
    DUAL: tl.constexpr = epilogue.gated and not INTERLEAVED
    acc_up = tl.zeros((SHAPE_0, SHAPE_1), dtype=functions.accumulate)
    b_state = functions.open_b(b_args, expert, 0, n, rows, BLOCK_N)
    up_state = functions.open_b(b_args, expert, 1 if DUAL else 0, n, rows, BLOCK_N)
    if PDL and not GEMM1:
        tl.extra.cuda.gdc_wait()
    a_state = functions.open_a(a_args, _rows(position, pair, top_k, A_ROWS), expert)
    steps = tl.cdiv(K, BLOCK_K)
    for k in range(steps * k_part // SPLIT_K, steps * (k_part + 1) // SPLIT_K):
        a, a_scale = functions.load_a(a_state, k, BLOCK_K)
        b, b_scale = functions.load_b(b_state, b_desc, k, K, BLOCK_K, EVEN_N, EVEN_K)
        if DUAL:
            b_up, b_up_scale = functions.load_b(up_state, b_desc, k, K, BLOCK_K, EVEN_N, EVEN_K)
            acc = functions.multiply(acc, a, a_scale, b, b_scale, SWAP_AB)
            acc_up = functions.multiply(acc_up, a, a_scale, b_up, b_up_scale, SWAP_AB)
        else:
            acc = functions.multiply(acc, a, a_scale, b, b_scale, SWAP_AB)

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    WIDTH: tl.constexpr = BLOCK_N // 2 if INTERLEAVED else BLOCK_N
    columns = block_n * WIDTH + tl.arange(0, WIDTH)
    target = _rows(position, pair, top_k, OUT_ROWS)
    if functions.scale_acc is not None:
        acc = functions.scale_acc(acc, a_state, b_state, SWAP_AB)
        if DUAL:
            acc_up = functions.scale_acc(acc_up, a_state, up_state, SWAP_AB)
    if INTERLEAVED:
        acc, acc_up = deinterleave(acc, SWAP_AB)
    if SPLIT_K == 1:
        EVEN: tl.constexpr = EVEN_N and not INTERLEAVED
        finish_tile(acc, acc_up, epilogue, result, N, expert, pair, target, mask, block_n, columns, SWAP_AB, EVEN)
    else:
        stored = as_column(mask, SWAP_AB) & as_row(columns < N, SWAP_AB)
        if not GEMM1:
            # Values that are added once belong to the first split: for the other splits no column is
            # inside.
            width = tl.where(k_part == 0, N, 0)
            added = stored & as_row(columns < width, SWAP_AB)
            acc = finish_values(acc, acc, epilogue, width, expert, pair, columns, added, activate, SWAP_AB, EVEN_N)
        offsets = as_column((target * SPLIT_K + k_part) * result.stride, SWAP_AB) + as_row(columns, SWAP_AB)
        tl.store(result.out + offsets, acc, mask=stored)
        if epilogue.gated:
            tl.store(result.out + offsets + N, acc_up, mask=stored)


@triton.jit
def _sum_partials(partials, columns, inside, stride, SPLIT_K: tl.constexpr):
    index = tl.arange(0, SPLIT_K)
    tile = tl.load(partials + index[:, None] * stride + columns[None, :], mask=inside[None, :], other=0.0)
    return tl.sum(tile, axis=0)[None, :]


@triton.jit
def split_k_reduce_kernel(
    partials,
    routing,
    epilogue,
    result,
    N,
    stride_partials,
    SPLIT_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum gemm1's partial sums and run its epilogue.

    A program takes `block` columns of one pair, a tile of one row. partials [pairs * SPLIT_K, N or 2N] float32;
    routing: `row_args`. The grid is (pairs, blocks of columns).
    """
    begin_pdl(PDL)
    pair = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    expert = expert_of(pair, pair >= 0, routing, "pairs")
    if expert < 0:
        return
    columns = block * result.block + tl.arange(0, result.block)
    inside = columns < N
    first = partials + pair * SPLIT_K * stride_partials
    value = _sum_partials(first, columns, inside, stride_partials, SPLIT_K)
    up = value
    if epilogue.gated:
        up = _sum_partials(first + N, columns, inside, stride_partials, SPLIT_K)
    one = tl.arange(0, 1)
    row = pair + one
    finish_tile(value, up, epilogue, result, N, expert, row, row, one == 0, block, columns, False, False)
