"""Block FP8 on Hopper with many rows per expert: loading, multiplying and scaling at the same time.

The tile kernel of `moe_core.gemm` alternates between the matrix units and the scaling of their results, and waits in
between.  Here one warp does nothing but request tiles (tensor memory accelerator, STAGES deep, running ahead into the
next tile), and two groups of four warps each own 64 rows of a 128-row tile: while one scales, the other multiplies.
Programs are persistent: one per multiprocessor, which walks through the tiles with a stride.

The operand A has the rows of a tile next to each other ([P, K] in sorted order).  Each program computes two blocks of
128 columns: gate and up, quantised together in the epilogue, or neighbours n and n + 128 of a plain product.

Written in Gluon, because the order of waits is the point; there is no interpreter for it.
"""

from __future__ import annotations

from moe_core.gemm.epilogue import activate_gated
from moe_core.gemm.narrow import divide
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# the names of Triton 3.6, where newer ones are missing
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
request = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

E4M3_MAX = gl.constexpr(448.0)
AMAX_FLOOR = gl.constexpr(1e-10)
# rows of a tile, columns of one of its two blocks, depth of a step: one quantisation block each way
TILE = gl.constexpr(128)
HALF = gl.constexpr(64)


@gluon.jit
def _tile_of(index, tiles, blocks_n, GROUP_M: gl.constexpr):
    """(tile, column block): GROUP_M row tiles share the columns that run at the same time."""
    group = index // (GROUP_M * blocks_n)
    first = group * GROUP_M
    size = gl.maximum(gl.minimum(tiles - first, GROUP_M), 1)
    within = index % (GROUP_M * blocks_n)
    return first + within % size, within // size


@gluon.jit
def _find(index, tiles_ptr, offsets, tiles, blocks_n, GROUP_M: gl.constexpr):
    """Expert, first and last row and column block of a tile; of the last tile for an index beyond it."""
    tile, block_n = _tile_of(gl.minimum(index, tiles * blocks_n - 1), tiles, blocks_n, GROUP_M)
    exists = tiles > 0
    expert = gl.load(tiles_ptr + 2 + 2 * tile, mask=exists, other=0)
    first = gl.load(tiles_ptr + 3 + 2 * tile, mask=exists, other=0)
    end = gl.load(offsets + expert + 1)
    return expert, first, end, block_n


@gluon.jit
def _produce(
    a_desc,
    b_desc,
    tiles_ptr,
    a_tiles,
    b_tiles,
    full,
    empty,
    tiles,
    blocks_n,
    steps,
    rows_per_expert,
    second,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """Request every tile that this program multiplies, as far ahead as there is room."""
    turn = 0
    for index in range(gl.program_id(0), tiles * blocks_n, gl.num_programs(0)):
        tile, block_n = _tile_of(index, tiles, blocks_n, GROUP_M)
        expert = gl.load(tiles_ptr + 2 + 2 * tile)
        first = gl.load(tiles_ptr + 3 + 2 * tile)
        row = expert * rows_per_expert + block_n * (TILE * BLOCKS)
        for k in range(steps):
            slot = turn % STAGES
            mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)
            ready = full.index(slot)
            mbarrier.expect(ready, 3 * TILE * TILE)
            request(a_desc, [first, k * TILE], ready, a_tiles.index(slot))
            request(b_desc, [row, k * TILE], ready, b_tiles.index(2 * slot))
            request(b_desc, [row + second, k * TILE], ready, b_tiles.index(2 * slot + 1))
            turn += 1


@gluon.jit
def _consume(
    tiles_ptr,
    offsets,
    pairs,
    a_scale,
    b_scale,
    out,
    out_scale,
    bias,
    weights,
    a_tiles,
    b_tiles,
    full,
    empty,
    tiles,
    blocks_n,
    steps,
    N,
    stride_a_scale,
    stride_b_scale_e,
    stride_b_scale_n,
    stride_out,
    stride_out_scale,
    stride_bias,
    alpha,
    beta,
    limit,
    WHICH: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    UP: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHT: gl.constexpr,
):
    """Multiply rows 64 * WHICH .. 64 * WHICH + 63 of every tile, scale, finish and store."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
    store_width: gl.constexpr = 16 if UP else 8
    store: gl.constexpr = gl.BlockedLayout(
        [1, store_width], [32 * store_width // 128, 128 // store_width], [4, 1], [1, 0]
    )
    BLOCKS: gl.constexpr = 1 if UP else 2
    turn = 0
    expert, start, end, block_n = _find(gl.program_id(0), tiles_ptr, offsets, tiles, blocks_n, GROUP_M)
    for index in range(gl.program_id(0), tiles * blocks_n, gl.num_programs(0)):
        # what the next tile is arrives while this one is multiplied
        following_tile = index + gl.num_programs(0)
        next_expert, next_start, next_end, next_block = _find(
            following_tile, tiles_ptr, offsets, tiles, blocks_n, GROUP_M
        )
        first = start + WHICH * HALF
        row = gl.minimum(first + gl.arange(0, HALF, layout=rows_layout), end - 1)
        scales = a_scale + row.to(gl.int64) * stride_a_scale
        first_scale = b_scale + expert.to(gl.int64) * stride_b_scale_e + block_n * BLOCKS * stride_b_scale_n
        if UP:
            second_scale = first_scale + gl.cdiv(N, TILE) * stride_b_scale_n
        else:
            # the second block may lie beyond the last column
            second_scale = first_scale + gl.where((block_n * 2 + 1) * TILE < N, stride_b_scale_n, 0)
        target = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, store))
        if not UP:
            pair = gl.load(pairs + gl.minimum(target, end - 1))
        if WEIGHT:
            weight = gl.load(weights + gl.load(pairs + row))
        acc_0 = gl.zeros([HALF, TILE], gl.float32, layout)
        acc_1 = gl.zeros([HALF, TILE], gl.float32, layout)
        zero = gl.zeros([HALF, TILE], gl.float32, layout)
        row_scale = gl.load(scales)
        scale_0 = gl.load(first_scale)
        scale_1 = gl.load(second_scale)
        for k in range(steps):
            slot = turn % STAGES
            by_0 = row_scale * scale_0
            by_1 = row_scale * scale_1
            # for the next step; the last one reads its own again
            following = gl.minimum(k + 1, steps - 1)
            row_scale = gl.load(scales + following)
            scale_0 = gl.load(first_scale + following)
            scale_1 = gl.load(second_scale + following)
            mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
            a = a_tiles.index(slot).slice(WHICH * HALF, HALF, 0)
            product = warpgroup_mma(a, b_tiles.index(2 * slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=[product])
            acc_0 += product * by_0[:, None]
            product = warpgroup_mma(a, b_tiles.index(2 * slot + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=[product])
            barrier()  # all four warps have read the slot
            mbarrier.arrive(empty.index(slot))
            acc_1 += product * by_1[:, None]
            turn += 1

        columns = block_n * (TILE * BLOCKS) + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
        if HAS_BIAS:
            bias_row = bias + expert.to(gl.int64) * stride_bias
            second: gl.constexpr = 0 if UP else TILE
            bias_0 = gl.load(bias_row + columns, mask=columns < N, other=0.0).to(gl.float32)
            bias_1 = gl.load(bias_row + (N if UP else TILE) + columns, mask=columns + second < N, other=0.0).to(
                gl.float32
            )
            acc_0 += bias_0[None, :]
            acc_1 += bias_1[None, :]
        stored_columns = block_n * (TILE * BLOCKS) + gl.arange(0, TILE, layout=gl.SliceLayout(0, store))
        if UP:
            value = activate_gated(acc_0, acc_1, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
            value = gl.where((columns < N)[None, :], value, 0.0)
            amax = gl.maximum(gl.max(gl.abs(value), axis=1), AMAX_FLOOR)
            scale = gl.div_rn(amax, E4M3_MAX)
            quantized = gl.convert_layout(divide(value, scale[:, None]).to(gl.float8e4nv), store)
            pointers = out + target.to(gl.int64)[:, None] * stride_out + stored_columns[None, :]
            gl.store(pointers, quantized, mask=(target < end)[:, None])
            row = first + gl.arange(0, HALF, layout=rows_layout)
            gl.store(out_scale + row.to(gl.int64) * stride_out_scale + block_n, scale, mask=row < end)
        else:
            if WEIGHT:
                acc_0 = acc_0 * weight[:, None]
                acc_1 = acc_1 * weight[:, None]
            pointers = out + pair.to(gl.int64)[:, None] * stride_out + stored_columns[None, :]
            exists = (target < end)[:, None]
            value = gl.convert_layout(acc_0.to(out.dtype.element_ty), store)
            gl.store(pointers, value, mask=exists & (stored_columns < N)[None, :])
            value = gl.convert_layout(acc_1.to(out.dtype.element_ty), store)
            gl.store(pointers + TILE, value, mask=exists & (stored_columns + TILE < N)[None, :])
        expert = next_expert
        start = next_start
        end = next_end
        block_n = next_block


@gluon.jit
def hopper_kernel(
    a_desc,
    b_desc,
    tiles_ptr,
    offsets,
    pairs,
    a_scale,
    b_scale,
    out,
    out_scale,
    bias,
    weights,
    N,
    K,
    rows_per_expert,
    stride_a_scale,
    stride_b_scale_e,
    stride_b_scale_n,
    stride_out,
    stride_out_scale,
    stride_bias,
    alpha,
    beta,
    limit,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    UP: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_LIMIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    WEIGHT: gl.constexpr,
    PDL: gl.constexpr,
):
    """One program per multiprocessor.

    UP: out [P, N padded] e4m3 and out_scale = quantize(act(A w13^T + bias)), rows in sorted order.

    Otherwise out[pair] = weight * (A w2^T + bias).  N: columns of the result (of one half when UP); a_desc [P, K] and
    b_desc [E * rows_per_expert, K] have blocks of 128 x 128.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    a_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, TILE], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, TILE, TILE], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    tiles = gl.load(tiles_ptr)
    steps = gl.cdiv(K, TILE)
    BLOCKS: gl.constexpr = 1 if UP else 2
    blocks_n = gl.cdiv(N, BLOCKS * TILE)
    second = N if UP else TILE  # rows from one weight block to the other
    # arguments stand here and not in variables, which would turn constants into values
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    tiles_ptr, offsets, pairs, a_scale, b_scale, out, out_scale, bias, weights, a_tiles, b_tiles,
                    full, empty, tiles, blocks_n, steps, N, stride_a_scale, stride_b_scale_e, stride_b_scale_n,
                    stride_out, stride_out_scale, stride_bias, alpha, beta, limit, gl.constexpr(0), STAGES, GROUP_M,
                    UP, ACTIVATION, HAS_LIMIT, HAS_BIAS, WEIGHT,
                ),
            ),
            (
                _consume,
                (
                    tiles_ptr, offsets, pairs, a_scale, b_scale, out, out_scale, bias, weights, a_tiles, b_tiles,
                    full, empty, tiles, blocks_n, steps, N, stride_a_scale, stride_b_scale_e, stride_b_scale_n,
                    stride_out, stride_out_scale, stride_bias, alpha, beta, limit, gl.constexpr(1), STAGES, GROUP_M,
                    UP, ACTIVATION, HAS_LIMIT, HAS_BIAS, WEIGHT,
                ),
            ),
            (
                _produce,
                (
                    a_desc, b_desc, tiles_ptr, a_tiles, b_tiles, full, empty, tiles, blocks_n, steps,
                    rows_per_expert, second, STAGES, GROUP_M, BLOCKS,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
