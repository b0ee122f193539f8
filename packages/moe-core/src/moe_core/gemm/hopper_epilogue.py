"""The end of a tile in `moe_core.gemm.hopper`: bias, activation, quantisation, and the way to memory.

`result` and `epilogue` as in the tile kernel; rows of the result are whole 16 bytes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.gemm.hopper_pipeline import HALF, TILE
from moe_core.jit import activation
from moe_core.ops._quantize_kernels import finite_bits


@gluon.jit
def activate(gate, up, epilogue):
    """`activation.activate`; nothing overlaps with it, so that gated silu is worth half the instructions."""
    if epilogue.gated and epilogue.activation == "silu" and epilogue.limit is None:
        silu = gl.inline_asm_elementwise(
            """
            {
                .reg .f32 %t;
                mul.f32 %t, $1, 0fBFB8AA3B;  // -log2(e)
                ex2.approx.ftz.f32 %t, %t;
                add.f32 %t, %t, 0f3F800000;
                rcp.approx.ftz.f32 %t, %t;
                mul.f32 $0, $1, %t;
            }
            """,
            "=f,f",
            [gate],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
        return silu * up
    else:
        return activation.activate(gate, up, epilogue)


@gluon.jit
def add_bias(acc, bias, column, N):
    """acc [64, 128] + bias of its columns."""
    return acc + gl.load(bias + column, mask=column < N, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def store_block(value, result, target, exists, first_column, layout: gl.constexpr):
    """Store [64, 128] in rows `target`, from column `first_column` on."""
    column = first_column + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
    pointers = result.out + target.to(gl.int64)[:, None] * result.stride + column[None, :]
    gl.store(pointers, gl.convert_layout(value, layout), mask=exists[:, None] & (column < result.width)[None, :])


@gluon.jit
def store_activated(value, result, expert, row, target, end, block, N, layout: gl.constexpr):
    """Block `block` of 128 columns of h, [64, 128], by sorted row; quantised as the tile kernel does it."""
    AMAX: gl.constexpr = result.amax_kind
    column = block * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, value.type.layout))
    # what a row has beyond the last column is 0, so that the next product may read it
    value = gl.where((column < N)[None, :], value, 0.0)
    if result.quantize is None:
        codes = value.to(result.out.dtype.element_ty)
        value = codes.to(gl.float32)
        # of single rows the tile kernel alone is asked for it: they are quantised on load where tiles are small
        if AMAX == "tensor":
            bits = gl.max(finite_bits(value), axis=1)
            gl.atomic_max(result.amax, gl.max(gl.where(row < end, bits, 0), axis=0), sem="relaxed")
    else:
        if AMAX == "nan":
            found = gl.max((value != value).to(gl.int32), axis=1)
            gl.store(result.amax + row, 0x7FC00000, mask=(row < end) & (found > 0))
        # tiles of the tile kernel may be half as wide
        GROUPS: gl.constexpr = TILE * result.groups // result.block
        GROUP: gl.constexpr = TILE // GROUPS
        codes, scale = result.quantize(value.reshape([HALF, GROUPS, GROUP]), result.quant_args, expert, 2)
        if result.scales is not None:
            rows = gl.convert_layout(row, gl.SliceLayout(1, scale.type.layout))[:, None]
            group = block * GROUPS + gl.arange(0, GROUPS, layout=gl.SliceLayout(0, scale.type.layout))[None, :]
            pointers = result.scales + rows.to(gl.int64) * result.stride_scales + group
            gl.store(pointers, scale, mask=(rows < end) & (group * GROUP < N))
        codes = gl.convert_layout(codes.reshape([HALF, TILE]), value.type.layout, assert_trivial=True)
    store_block(codes, result, target, target < end, block * TILE, layout)
