"""One-byte elements on Hopper with many rows per expert: overlapped load, MMA and scaling.

The tile kernel of `moe_core.kernels.gemm` alternates between the tensor cores and the scaling of their results, and
stalls in between. Here one producer warp only requests tiles by TMA, STAGES deep and running ahead into the next tile.
Two consumer warp groups own 64 rows each of a 128-row tile: while one scales, the other multiplies. The kernel is
persistent: one CTA per SM, which takes one tile after another. Where the last tile of an expert has 64 rows or fewer,
the two warp groups may share its rows, and each own a column block.

The rows of a tile are adjacent in operand A ([P, K] in sorted order, or [E * T_max, K]). Each CTA computes two blocks
of 128 columns: gate and up, joined in the epilogue, or neighbors n and n + 128 of an ungated GEMM.

Exposed latency would be a third of the time of a tile with few steps. So a tile's scales and pairs are requested before
the epilogue of the previous tile, and its router weights before its own mainloop.

The kernel is written in Gluon because the order of waits matters. There is no interpreter for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from moe_core.kernels.device.gluon import barrier
from moe_core.kernels.device.pdl import begin_pdl
from moe_core.kernels.gemm.sm90.epilogue import finish_block
from moe_core.kernels.gemm.sm90.pipeline import (
    HALF,
    LAYOUT,
    TILE,
    allocate_barriers,
    allocate_meeting,
    allocate_queue,
    is_short,
    producer,
    receive,
)


class KernelForm(NamedTuple):
    """Compile-time parameters of the kernel: its mainloop, the loads before it, and constants.

    Attributes:
        prefetch: Device function that loads what the mainloop needs.
        multiply: Device function of the mainloop.
        group_m: Row tiles that are rasterized together.
        short: How tiles of at most 64 rows are computed, see `moe_core.kernels.gemm.sm90.pipeline`; the result is the
            same.
    """

    prefetch: Any
    multiply: Any
    group_m: gl.constexpr
    short: gl.constexpr


@gluon.jit
def _share(tile, form, WARPGROUP: gl.constexpr):
    """(first row, rows [64] that may be read, column block) of one consumer's share of a tile.

    For a short tile: all rows, and column block n + WARPGROUP.
    """
    _, start, end, block_n = tile
    short = is_short(tile, form)
    first = start + gl.where(short, 0, WARPGROUP * HALF)
    row = gl.minimum(first + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT)), end - 1)
    return first, gl.maximum(row, 0), block_n + gl.where(short, WARPGROUP, 0)


@gluon.jit
def _prefetch(tile, schedule, a_args, b_args, epilogue, N, form, WARPGROUP: gl.constexpr):
    """Loads for a tile, in flight: (inputs of the mainloop, pairs of the rows).

    The pairs are () where none are needed.
    """
    _, row, block_n = _share(tile, form, WARPGROUP)
    pairs = ()
    if epilogue.weights is not None:
        pairs += (gl.load(schedule[2] + row),)
    return form.prefetch(row, tile[0], block_n, a_args, b_args, N, epilogue.gated), pairs


@gluon.jit
def _consumer(schedule, a_args, b_args, result, epilogue, ring, queue, met, sizes, form, WARPGROUP: gl.constexpr):
    """Multiply, scale, finish and store 64 rows of every tile.

    The rows are 64 * WARPGROUP .. 64 * WARPGROUP + 63; see `_share` for short tiles.
    """
    pairs = schedule[2]
    tiles, blocks_n, steps, N = sizes
    GEMM1: gl.constexpr = epilogue.activation != ""
    GATED: gl.constexpr = epilogue.gated
    bits: gl.constexpr = result.out.dtype.element_ty.primitive_bitwidth
    # float32 is stored directly, in whole sectors. Other types go through shared memory, 16 bytes per thread.
    width: gl.constexpr = 128 // bits
    rows_first: gl.constexpr = gl.BlockedLayout([1, width], [32 * width // 128, 128 // width], [4, 1], [1, 0])
    store: gl.constexpr = LAYOUT if bits == 32 else rows_first
    BLOCKS: gl.constexpr = 1 if GATED else 2
    turn = 0
    shorts = 0
    received = 1
    index, tile = receive(queue, 0)
    ahead = _prefetch(tile, schedule, a_args, b_args, epilogue, N, form, WARPGROUP)
    while index < tiles * blocks_n:
        # The next tile's location arrives while this one is multiplied.
        index, next_tile = receive(queue, received)
        received += 1
        expert, _, end, _ = tile
        short = is_short(tile, form)
        first, row, block_n = _share(tile, form, WARPGROUP)
        # The stages of a short tile alternate between the two consumers.
        own = gl.where(short, WARPGROUP, 0)
        stride = gl.where(short, 2, 1)
        slots = (ring[0], ring[1], ring[2], ring[3], turn + own, stride)
        target = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, store))
        place = target
        if not GEMM1 and pairs is not None:
            place = gl.load(pairs + gl.minimum(target, end - 1))
        weight = None
        if epilogue.weights is not None:
            weight = gl.load(epilogue.weights + ahead[1][0])[:, None]
        if form.short:
            mbarrier.wait(met[0], (shorts & 1) ^ 1)
        zero = turn - turn  # 0 as a runtime value
        acc_0, acc_1, taken = form.multiply(
            zero, ahead[0], row, expert, block_n, a_args, b_args, slots, steps, N, WARPGROUP, GATED
        )
        turn += taken * stride
        if form.short:
            barrier()
            mbarrier.arrive(met[0], pred=short)
            shorts += short.to(gl.int32)
        ahead = _prefetch(next_tile, schedule, a_args, b_args, epilogue, N, form, WARPGROUP)
        if first < end:
            rows = (first, end, target, place)
            block = block_n * BLOCKS
            finish_block(acc_0, acc_1, weight, epilogue, result, expert, rows, block, N, store)
            if not GATED:
                finish_block(acc_1, acc_1, weight, epilogue, result, expert, rows, block + 1, N, store)
        tile = next_tile


@gluon.jit
def hopper_kernel(
    a_desc,
    b_desc,
    schedule,
    a_args,
    b_args,
    result,
    epilogue,
    N,
    K,
    strides,
    form,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Persistent grouped GEMM of one-byte elements: one CTA per SM.

    GEMM1: out [P, width] = quantize(act(A w13^T + bias)), rows in sorted order; gemm2: out[pair] = A w2^T + bias.

    - a_desc [P, K], b_desc over all weights: descriptors with blocks of 128 x depth of a step; strides: see `producer`
    - a_args and b_args: scales, see the mainloops; schedule, result and epilogue as in the tile kernel
    - N: columns of the result, of one half if gated; form: `KernelForm`
    """
    begin_pdl(PDL)
    DEPTH: gl.constexpr = a_desc.block_shape[1]
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES, TILE, DEPTH], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 2 * TILE, DEPTH], b_desc.layout)
    gl.static_assert(STAGES % 2 == 0 or not form.short, "consumers of a short tile have every other slot")
    full, empty = allocate_barriers(STAGES, 1)
    queue = allocate_queue()
    met = allocate_meeting(form.short)
    fence_async_shared()
    ring = (a_tiles, b_tiles, full, empty)
    tiles = gl.load(schedule[0])
    steps = gl.cdiv(K, DEPTH)
    BLOCKS: gl.constexpr = 1 if epilogue.gated else 2
    blocks_n = gl.cdiv(N, BLOCKS * TILE)
    sizes = (tiles, blocks_n, steps, N)
    second = N if epilogue.gated else TILE  # row distance of the two weight blocks
    # Constants are passed inline: variables would turn them into values.
    gl.warp_specialize(
        [
            (_consumer, (schedule, a_args, b_args, result, epilogue, ring, queue, met, sizes, form, gl.constexpr(0))),
            (_consumer, (schedule, a_args, b_args, result, epilogue, ring, queue, met, sizes, form, gl.constexpr(1))),
            (
                producer,
                (a_desc, b_desc, schedule, ring, queue, tiles, blocks_n, steps, strides, second, form, BLOCKS),
            ),
        ],
        [4, 1],
        [232, 40],
    )
