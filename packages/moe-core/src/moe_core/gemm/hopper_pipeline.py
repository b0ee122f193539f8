"""What every k loop of `moe_core.gemm.hopper` shares: its tiles, the warp that requests them, and slots for operands.

    ring = (a_tiles, b_tiles, full, empty, start, stride)

A slot of shared memory holds the operands of one step: 128 rows of A and two blocks of 128 rows of B, as deep as the
blocks of their descriptors.  `full` and `empty` are its barriers.  Step `turn` of a tile is in slot start + turn *
stride, counted without end.

Programs draw their tiles from a counter, tiles[1] of the schedule, which is 0 before the kernel and after it.  The
producer draws one tile ahead, and tells the consumers by a queue.

A short tile, the end of an expert with at most 64 rows, is the work of one consumer.  With SHORT the two consumers
multiply the same rows by neighbouring column blocks, each from slots of its own, every other one of the ring.  Its
items of odd column blocks are nobody's.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from moe_core.gemm.schedule import tile_of

# the names of Triton 3.6, where newer ones are missing
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

# rows of a tile, columns of one of its two blocks
TILE = gl.constexpr(128)
# rows that one group of four warps owns
HALF = gl.constexpr(64)
# indices that the producer may be ahead of the consumers
QUEUE = gl.constexpr(4)
# of a product [64, 128]
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))


@gluon.jit
def locate_tile(index, schedule, tiles, blocks_n, GROUP_M: gl.constexpr):
    """Expert, first and last row and column block of a tile; of the last tile for an index beyond it."""
    tiles_ptr, offsets, pairs = schedule
    last = tiles * blocks_n - 1
    tile, block_n = tile_of(gl.minimum(index, last), gl.maximum(tiles, 1), blocks_n, GROUP_M)
    exists = tiles > 0
    expert = gl.load(tiles_ptr + 2 + 2 * tile, mask=exists, other=0)
    first = gl.load(tiles_ptr + 3 + 2 * tile, mask=exists, other=0)
    end = gl.load(offsets + expert + 1)
    return expert, first, end, block_n


@gluon.jit
def wait_for_slot(ring, turn, WARPGROUP: gl.constexpr):
    """The operands of step `turn`: the consumer's 64 rows of A, and both blocks of B."""
    a_tiles, b_tiles, full, empty, start, stride = ring
    STAGES: gl.constexpr = full.shape[0]
    place = start + turn * stride
    slot = place % STAGES
    mbarrier.wait(full.index(slot), (place // STAGES) & 1)
    return a_tiles.index(slot).slice(WARPGROUP * HALF, HALF, 0), b_tiles.index(slot)


@gluon.jit
def free_slot(ring, turn, some):
    """All four warps have read the operands of step `turn`; if `some`."""
    a_tiles, b_tiles, full, empty, start, stride = ring
    STAGES: gl.constexpr = empty.shape[0]
    barrier()
    mbarrier.arrive(empty.index((start + turn * stride) % STAGES), pred=some)


@gluon.jit
def allocate_queue():
    """(indices, sent, taken): what the producer tells the consumers, and its barriers."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    indices = gl.allocate_shared_memory(gl.int32, [QUEUE, 1], layout)
    sent = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(QUEUE):
        mbarrier.init(sent.index(slot), count=1)
        mbarrier.init(taken.index(slot), count=2)
    return indices, sent, taken


@gluon.jit
def receive(queue, turn):
    """The index that was sent as number `turn`."""
    indices, sent, taken = queue
    slot = turn % QUEUE
    mbarrier.wait(sent.index(slot), (turn // QUEUE) & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    index = gl.max(indices.index(slot).load(layout), axis=0)
    barrier()
    mbarrier.arrive(taken.index(slot))
    return index


@gluon.jit
def _send(queue, turn, index):
    indices, sent, taken = queue
    slot = turn % QUEUE
    mbarrier.wait(taken.index(slot), ((turn // QUEUE) & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    indices.index(slot).store(gl.full([1], 0, gl.int32, layout) + index)
    barrier()
    mbarrier.arrive(sent.index(slot))


@gluon.jit
def is_short(first, end):
    """Whether a tile has the rows of one consumer only."""
    return end - first <= HALF


@gluon.jit
def _draw(counter, total):
    """An index that no program had.  Each program has its own number first, and stops at the first beyond the last."""
    programs = gl.num_programs(0)
    drawn = gl.atomic_add(counter, 1, sem="relaxed")
    if drawn == gl.maximum(total - programs, 0) + programs - 1:
        # the last of all draws: for the next kernel
        gl.store(counter, 0)
    return drawn + programs


@gluon.jit
def _next_tile(schedule, tiles, blocks_n, GROUP_M: gl.constexpr, SHORT: gl.constexpr):
    """The index of the next tile of this program, and where it is."""
    total = tiles * blocks_n
    index = _draw(schedule[0] + 1, total)
    expert, first, end, block_n = locate_tile(index, schedule, tiles, blocks_n, GROUP_M)
    if SHORT:
        # done with the column block before it
        while index < total and is_short(first, end) and block_n % 2 == 1:
            index = _draw(schedule[0] + 1, total)
            expert, first, end, block_n = locate_tile(index, schedule, tiles, blocks_n, GROUP_M)
    return index, expert, first, end, block_n


@gluon.jit
def producer(
    a_desc, b_desc, schedule, ring, queue, tiles, blocks_n, steps, rows_per_expert, second, GROUP_M: gl.constexpr,
    BLOCKS: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    """Request every tile that this program multiplies, as far ahead as there is room."""
    a_tiles, b_tiles, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    DEPTH: gl.constexpr = a_desc.block_shape[1]
    total = tiles * blocks_n
    index = gl.program_id(0)
    expert, first, end, block_n = locate_tile(index, schedule, tiles, blocks_n, GROUP_M)
    if index >= total or (SHORT and is_short(first, end) and block_n % 2 == 1):
        index, expert, first, end, block_n = _next_tile(schedule, tiles, blocks_n, GROUP_M, SHORT)
    _send(queue, 0, index)
    sent = 1
    turn = 0
    while index < total:
        # sent before the tile is requested: consumers ask for it before they multiply
        index, next_expert, next_first, next_end, next_block = _next_tile(schedule, tiles, blocks_n, GROUP_M, SHORT)
        _send(queue, sent, index)
        sent += 1
        short = is_short(first, end) if SHORT else False
        row = expert * rows_per_expert + block_n * (TILE * BLOCKS)
        parts = gl.where(short, 2, 1)
        for i in range(steps * parts):
            k = i // parts
            part = i % parts
            slot = turn % STAGES
            mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)
            ready = full.index(slot)
            if short:
                # for the consumer that does not read the slot
                mbarrier.arrive(empty.index(slot))
                mbarrier.expect(ready, (HALF + 2 * TILE) * DEPTH)
                if part == 0:
                    tma_load(a_desc, [first, k * DEPTH], ready, a_tiles.index(slot).slice(0, HALF, 0))
                else:
                    tma_load(a_desc, [first, k * DEPTH], ready, a_tiles.index(slot).slice(HALF, HALF, 0))
            else:
                mbarrier.expect(ready, 3 * TILE * DEPTH)
                tma_load(a_desc, [first, k * DEPTH], ready, a_tiles.index(slot).slice(0, HALF, 0))
                tma_load(a_desc, [first + HALF, k * DEPTH], ready, a_tiles.index(slot).slice(HALF, HALF, 0))
            block = row + part * (TILE * BLOCKS)
            tma_load(b_desc, [block, k * DEPTH], ready, b_tiles.index(slot).slice(0, TILE, 0))
            tma_load(b_desc, [block + second, k * DEPTH], ready, b_tiles.index(slot).slice(TILE, TILE, 0))
            turn += 1
        expert = next_expert
        first = next_first
        end = next_end
        block_n = next_block
