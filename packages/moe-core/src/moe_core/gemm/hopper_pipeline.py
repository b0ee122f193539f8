"""What every k loop of `moe_core.gemm.hopper` shares: its tiles, the warp that requests them, and slots for operands.

    ring = (a_tiles, b_tiles, full, empty)

A slot of shared memory holds the operands of one step: 128 rows of A and two blocks of 128 rows of B, as deep as the
blocks of their descriptors.  `full` and `empty` are its barriers.
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
    a_tiles, b_tiles, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    slot = turn % STAGES
    mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
    return a_tiles.index(slot).slice(WARPGROUP * HALF, HALF, 0), b_tiles.index(slot)


@gluon.jit
def free_slot(ring, turn, some):
    """All four warps have read the operands of step `turn`; if `some`."""
    STAGES: gl.constexpr = ring[3].shape[0]
    barrier()
    mbarrier.arrive(ring[3].index(turn % STAGES), pred=some)


@gluon.jit
def producer(
    a_desc, b_desc, schedule, ring, tiles, blocks_n, steps, rows_per_expert, second, GROUP_M: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """Request every tile that this program multiplies, as far ahead as there is room."""
    tiles_ptr, offsets, pairs = schedule
    a_tiles, b_tiles, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    DEPTH: gl.constexpr = a_desc.block_shape[1]
    turn = 0
    for index in range(gl.program_id(0), tiles * blocks_n, gl.num_programs(0)):
        tile, block_n = tile_of(index, tiles, blocks_n, GROUP_M)
        expert = gl.load(tiles_ptr + 2 + 2 * tile)
        first = gl.load(tiles_ptr + 3 + 2 * tile)
        row = expert * rows_per_expert + block_n * (TILE * BLOCKS)
        for k in range(steps):
            slot = turn % STAGES
            mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)
            ready = full.index(slot)
            mbarrier.expect(ready, 3 * TILE * DEPTH)
            tma_load(a_desc, [first, k * DEPTH], ready, a_tiles.index(slot))
            tma_load(b_desc, [row, k * DEPTH], ready, b_tiles.index(slot).slice(0, TILE, 0))
            tma_load(b_desc, [row + second, k * DEPTH], ready, b_tiles.index(slot).slice(TILE, TILE, 0))
            turn += 1
