"""Words of 4-bit codes as the left operand of `moe_core.gemm.marlin.hopper`: 64 rows of weights at a time.

A group of four warps takes a step's words from shared memory and makes numbers of them in registers, where the tensor
cores want them: `wgmma` and `mma.sync` have the left operand's columns in the same places.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from moe_core.gemm.hopper_pipeline import full_slot
from moe_core.gemm.marlin.dequant import in_columns
from moe_core.jit.registers import both_halves, half_of, split_last

# rows of weights of one product
ROWS = gl.constexpr(64)
# of which a group of warps of `moe_core.gemm.marlin.hopper` has so many blocks
BLOCKS = gl.constexpr(2)
# columns of a step, of one product, and of one word of each of four threads
STEP = gl.constexpr(128)
CHUNK = gl.constexpr(64)
WORDS = gl.constexpr(16)
_LANES = [[1, 0], [2, 0], [4, 0]]
_WARPS = [[16, 0], [32, 0]]
# words [ROWS, 16]: a thread has 16 bytes of row r and of row r + 8
WORD_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], *_LANES], _WARPS, [], [64, 16])
)
# the same of two rows in one, [ROWS / 2, 32]
PAIR_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [4, 0]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[8, 0], [16, 0]], [], [32, 32]
    )
)
# one word u of each of four threads, [ROWS, 4]
QUARTER = gl.constexpr(gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], *_LANES], _WARPS, [], [64, 4]))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, QUARTER.value))


@gluon.jit
def quarters(words):
    """words [64, 16] as four [64, 4]: word u of four threads each."""
    parts = split_last(words.reshape([ROWS, 4, 4]))
    quarters = ()
    for u in gl.static_range(4):
        quarters += (gl.convert_layout(parts[u], QUARTER, assert_trivial=True),)
    return quarters


@gluon.jit
def numbers_of(words, scales, PLACE: gl.constexpr, layout: gl.constexpr, dequantize: gl.constexpr, dtype: gl.constexpr):
    """Numbers [64, 64] of columns 64 * PLACE .. of a step, as the tensor cores' left operand."""
    low = in_columns(dequantize(words[2 * PLACE], scales, 2 * PLACE, dtype), 1)
    high = in_columns(dequantize(words[2 * PLACE + 1], scales, 2 * PLACE + 1, dtype), 1)
    numbers = gl.join(low, high).permute([0, 2, 1]).reshape([64, 64])
    return gl.convert_layout(numbers, layout, assert_trivial=True)


@gluon.jit
def load_scales(pointers, k, stride, groups, GROUPS: gl.constexpr):
    """Scales [64] of the GROUPS groups of step k, of each block of rows; 0: of the row."""
    found = ()
    for block in gl.static_range(len(pointers)):
        of_block = ()
        if GROUPS == 0:
            of_block += (gl.load(pointers[block]),)
        for i in gl.static_range(GROUPS):
            group = gl.minimum(k * GROUPS + i, groups - 1)
            of_block += (gl.load(pointers[block] + group * stride),)
        found += (of_block,)
    return found


@gluon.jit
def _scales_of_slot(ring, slot, k, first, form, dtype: gl.constexpr):
    """Scales [64] of the groups of step k of a tile, of the rows from row `first` of the tile on.

    They are of `dtype`; of 16 bits, words have two groups' each, and a step of one group takes one half of its word.
    """
    PER_STEP: gl.constexpr = ring[4].shape[0] // ring[2].shape[0]
    found = ()
    for i in gl.static_range(PER_STEP):
        values = ring[4].index(slot * PER_STEP + i).slice(first, ROWS, 0).load(ROW_LAYOUT)
        if dtype.primitive_bitwidth != 16:
            found += (values,)
        elif form.groups == 1:
            found += (half_of(values, k % 2, dtype),)
        else:
            found += both_halves(values, dtype)
    return found


@gluon.jit
def load_words(ring, turn, k, given, form, dtype: gl.constexpr, WARPGROUP: gl.constexpr):
    """(words, scales) of step `turn`, of each block of 64 rows of a consumer.

    It is step k of its tile.  dtype: of the scales as they are stored.
    given: scales of the rows, which all steps have; where groups have scales, what these are multiplied by, or None.
    """
    slot = full_slot(ring[2], turn)
    if form.gathers:
        fence_async_shared()
    SHARED: gl.constexpr = ring[1].shape[2] // WORDS
    words = ()
    scales = ()
    for block in gl.static_range(BLOCKS):
        rows = ring[1].index(slot).slice((WARPGROUP * BLOCKS + block) * ROWS // SHARED, ROWS // SHARED, 0)
        if SHARED == 2:
            loaded = gl.convert_layout(rows.load(PAIR_LAYOUT).reshape([ROWS, WORDS]), WORD_LAYOUT, assert_trivial=True)
        else:
            loaded = rows.load(WORD_LAYOUT)
        words += (quarters(loaded),)
        of_block = ()
        if form.groups > 0:
            found = _scales_of_slot(ring, slot, k, (WARPGROUP * BLOCKS + block) * ROWS, form, dtype)
            for i in gl.static_range(form.groups):
                scale = found[i]
                if given is not None:
                    scale *= given
                of_block += (scale,)
        scales += (of_block,)
    if form.groups == 0:
        return words, given
    else:
        return words, scales
