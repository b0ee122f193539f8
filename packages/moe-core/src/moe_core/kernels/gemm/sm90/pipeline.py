"""Shared parts of the mainloops of `moe_core.kernels.gemm.sm90.kernel`.

These are its tiles, the producer warp that requests them, and the stages for operands.

    ring = (a_tiles, b_tiles, full, empty, start, stride)

A stage of shared memory holds the operands of one step: 128 rows of A and two blocks of 128 rows of B, as deep as the
blocks of their descriptors. `full` and `empty` are its barriers. Iteration `turn` of a tile is in stage start + turn *
stride, a running index.

CTAs draw their tiles from a counter, tiles[1] of the schedule, which is 0 before and after the kernel. The producer
draws ahead, locates the tile and passes it to the consumers through a queue.

A short tile, the end of an expert with at most 64 rows, is enough work for one consumer only. With `short`, the two
consumers multiply the same rows by neighboring column blocks, each from separate stages, every other one of the ring.
The items of odd column blocks of such a tile are skipped. After it the two consumers synchronize, see
`allocate_meeting`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moe_core.kernels.device.gluon import barrier, tma_load
from moe_core.kernels.gemm.tiles.schedule import tile_of

# Rows of a tile, and columns of one of its two blocks.
TILE = gl.constexpr(128)
# Rows that one warp group owns.
HALF = gl.constexpr(64)
# Number of tiles that the producer may be ahead of the consumers.
QUEUE = gl.constexpr(4)
# Layout of an accumulator [64, 128].
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))


@gluon.jit
def tile_start(index, schedule, tiles, blocks_n, GROUP_M: gl.constexpr):
    """Expert, first row and column block of a tile; the last tile for an index beyond it."""
    last = gl.maximum(tiles * blocks_n - 1, 0)
    tile, block_n = tile_of(gl.minimum(index, last), gl.maximum(tiles, 1), blocks_n, GROUP_M)
    exists = tiles > 0
    expert = gl.load(schedule[0] + 2 + 2 * tile, mask=exists, other=0)
    first = gl.load(schedule[0] + 3 + 2 * tile, mask=exists, other=0)
    return expert, first, block_n


@gluon.jit
def locate_tile(index, schedule, tiles, blocks_n, GROUP_M: gl.constexpr):
    """`tile_start` with the end of the expert's rows: (expert, first row, end, column block)."""
    expert, first, block_n = tile_start(index, schedule, tiles, blocks_n, GROUP_M)
    return expert, first, gl.load(schedule[1] + expert + 1), block_n


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr, PRODUCERS: gl.constexpr):
    """(full, empty) of STAGES stages: PRODUCERS arrive at the first, two consumers at the second."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=PRODUCERS)
        mbarrier.init(empty.index(slot), count=2)
    return full, empty


@gluon.jit
def allocate_meeting(SHORT: gl.constexpr):
    """(barrier at which both consumers arrive after a short tile,); () if not `SHORT`.

    The memory of a barrier that is never waited for would be given to data: see `tests/kit/moe_kit/hazards.py`.

    A wait for a phase also ends while the phase before it is not complete. A consumer does not wait for the other's
    stages. So before the next tile requests one of them, the other consumer must have seen it filled.
    """
    if SHORT:
        met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(met, count=2)
        return (met,)
    else:
        return ()


@gluon.jit
def slot_and_phase(place, SLOTS: gl.constexpr):
    """The stage of iteration `place`, and the phase of its barriers."""
    if SLOTS & (SLOTS - 1) == 0:
        # On the critical path of each step: a signed division would also test the sign.
        return place & (SLOTS - 1), (place & SLOTS) // SLOTS
    else:
        return place % SLOTS, (place // SLOTS) & 1


@gluon.jit
def full_slot(full, place):
    """Wait until the stage of iteration `place` is filled, and return the stage."""
    slot, phase = slot_and_phase(place, full.shape[0])
    mbarrier.wait(full.index(slot), phase)
    return slot


@gluon.jit
def empty_slot(empty, place):
    """Producer acquire: wait until the consumers have released the stage of iteration `place`, and return its index."""
    slot, phase = slot_and_phase(place, empty.shape[0])
    mbarrier.wait(empty.index(slot), phase ^ 1)
    return slot


@gluon.jit
def wait_for_slot(ring, turn, WARPGROUP: gl.constexpr):
    """The operands of iteration `turn` of a tile: the consumer's 64 rows of A, and both blocks of B."""
    slot = full_slot(ring[2], ring[4] + turn * ring[5])
    return ring[0].index(slot).slice(WARPGROUP * HALF, HALF, 0), ring[1].index(slot)


@gluon.jit
def free_slot(ring, turn, some):
    """Free the stage of iteration `turn` when all four warps have read its operands; only if `some`."""
    barrier()
    slot, _ = slot_and_phase(ring[4] + turn * ring[5], ring[3].shape[0])
    mbarrier.arrive(ring[3].index(slot), pred=some)


@gluon.jit
def allocate_queue():
    """(tiles, sent, taken): the queue from the producer to the consumers, and its barriers."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    # Field i of an entry is at i * QUEUE.
    entries = gl.allocate_shared_memory(gl.int32, [5 * QUEUE, 1], layout)
    sent, taken = allocate_barriers(QUEUE, 1)
    return entries, sent, taken


@gluon.jit
def receive(queue, turn):
    """The index that was sent as entry `turn`, and its `locate_tile`."""
    entries, sent, taken = queue
    slot = full_slot(sent, turn)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    numbers = ()
    for i in gl.static_range(5):
        numbers += (gl.max(entries.index(slot + i * QUEUE).load(layout), axis=0),)
    barrier()
    mbarrier.arrive(taken.index(slot))
    return numbers[0], numbers[1:]  # type: ignore[misc]


@gluon.jit
def _send(queue, turn, index, tile):
    entries, sent, taken = queue
    slot = empty_slot(taken, turn)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    numbers = (index,) + tile
    for i in gl.static_range(5):
        entries.index(slot + i * QUEUE).store(gl.full([1], 0, gl.int32, layout) + numbers[i])
    barrier()
    mbarrier.arrive(sent.index(slot))


@gluon.jit
def is_short(tile, form):
    """Whether a tile has rows for one consumer only and the two share it."""
    return form.short and tile[2] - tile[1] <= HALF


@gluon.jit
def _is_done(tile, form):
    """Whether a tile was already computed with the previous column block."""
    return is_short(tile, form) and tile[3] % 2 == 1


@gluon.jit
def _draw(counter, total):
    """Draw an index that no CTA has had.

    The first index of each CTA is its own number. It stops at the first index beyond the last. `atom.inc` wraps around:
    the last of all draws leaves 0 for the next kernel.
    """
    programs = gl.num_programs(0)
    last = gl.maximum(total - programs, 0) + programs - 1
    # `gl.atomic_add` is a branch of one thread, which `ptxas` may not reconverge with its warp before the other
    # threads read the result: see `tests/kit/moe_kit/hazards.py`.
    thread = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    drawn = gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        setp.eq.s32 first, $1, 0;
        mov.b32 $0, 0;
        @first atom.relaxed.gpu.global.inc.u32 $0, [$2], $3;
        }""",
        "=&r,r,l,r",
        [thread, counter.to(gl.int64), last],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return gl.max(drawn, axis=0) + programs


@gluon.jit
def _next_tile(schedule, tiles, blocks_n, form):
    """The index of the next tile of this CTA, and its location."""
    total = tiles * blocks_n
    index = _draw(schedule[0] + 1, total)
    tile = locate_tile(index, schedule, tiles, blocks_n, form.group_m)
    if form.short:
        while index < total and _is_done(tile, form):
            index = _draw(schedule[0] + 1, total)
            tile = locate_tile(index, schedule, tiles, blocks_n, form.group_m)
    return index, tile


@gluon.jit
def producer(
    a_desc, b_desc, schedule, ring, queue, tiles, blocks_n, steps, strides, second, form, BLOCKS: gl.constexpr
):
    """Request every tile that this CTA multiplies, as far ahead as there are free stages.

    strides: rows of b_desc from one expert to the next, and rows and columns from one k-loop step to the next.
    """
    a_tiles, b_tiles, full, empty = ring
    DEPTH: gl.constexpr = a_desc.block_shape[1]
    total = tiles * blocks_n
    index = gl.program_id(0)
    tile = locate_tile(index, schedule, tiles, blocks_n, form.group_m)
    if index >= total or _is_done(tile, form):
        index, tile = _next_tile(schedule, tiles, blocks_n, form)
    _send(queue, 0, index, tile)
    sent = 1
    turn = 0
    while index < total:
        # Send before requesting the tile: consumers ask for it before they multiply.
        index, next_tile = _next_tile(schedule, tiles, blocks_n, form)
        _send(queue, sent, index, next_tile)
        sent += 1
        expert, first, end, block_n = tile
        short = is_short(tile, form)
        row = expert * strides[0] + block_n * (TILE * BLOCKS)
        parts = gl.where(short, 2, 1)
        for i in range(steps * parts):
            k = i // parts
            part = i % parts
            slot = empty_slot(empty, turn)
            ready = full.index(slot)
            if short:
                # On behalf of the consumer that does not read the stage.
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
            block = row + part * (TILE * BLOCKS) + k * strides[1]
            column = k * strides[2]
            tma_load(b_desc, [block, column], ready, b_tiles.index(slot).slice(0, TILE, 0))
            tma_load(b_desc, [block + second, column], ready, b_tiles.index(slot).slice(TILE, TILE, 0))
            turn += 1
        tile = next_tile
