"""Epilogue of `moe_core.kernels.gemm.sm90.kernel`.

It applies bias and activation, quantizes and stores. `result` and `epilogue` as in the tile kernel; rows of the result
are multiples of 16 bytes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.kernels.device import activation
from moe_core.kernels.gemm.sm90.pipeline import HALF, TILE
from moe_core.kernels.gemm.tiles.tile_kernel import finish_values
from moe_core.kernels.ops._quantize_kernels import finite_bits


@gluon.jit
def activate(gate, up, epilogue):
    """`activation.activate` with a faster gated silu.

    Nothing overlaps with the epilogue, so that halving the instructions of gated silu pays.
    """
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
def finish_block(acc, up, weight, epilogue, result, expert, rows, block, N, layout: gl.constexpr):
    """Run the epilogue of a sum [64, 128] of column block `block`, up to the stores.

    `up`: the second sum if gated. Only h is quantized. rows = (first row, end of the expert's rows, rows in `layout`,
    their rows in the result)
    """
    first, end, target, place = rows
    OWN: gl.constexpr = acc.type.layout
    AMAX: gl.constexpr = result.amax_kind
    row = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, OWN))
    column = block * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, OWN))
    value = finish_values(acc, up, epilogue, N, expert, row, column, None, activate, False, False, weight)
    if result.quantize is None:
        codes = value.to(result.out.dtype.element_ty)
        # Row-wise amax is requested from the tile kernel only: rows are quantized on load where tiles are
        # small.
        if AMAX == "tensor":
            bits = gl.max(finite_bits(codes.to(gl.float32)), axis=1)
            gl.atomic_max(result.amax, gl.max(gl.where(row < end, bits, 0), axis=0), sem="relaxed")
    else:
        if AMAX == "nan":
            found = gl.max((value != value).to(gl.int32), axis=1)
            gl.store(result.amax + row, 0x7FC00000, mask=(row < end) & (found > 0))
        # Tiles of the tile kernel may be half as wide.
        GROUPS: gl.constexpr = TILE * result.groups // result.block
        GROUP: gl.constexpr = TILE // GROUPS
        codes, scale = result.quantize(value.reshape([HALF, GROUPS, GROUP]), result.quant_args, expert, 2)
        if result.scales is not None:
            rows_of_scales = gl.convert_layout(row, gl.SliceLayout(1, scale.type.layout))[:, None]
            group = block * GROUPS + gl.arange(0, GROUPS, layout=gl.SliceLayout(0, scale.type.layout))[None, :]
            pointers = result.scales + rows_of_scales.to(gl.int64) * result.stride_scales + group
            gl.store(pointers, scale, mask=(rows_of_scales < end) & (group * GROUP < N))
        codes = gl.convert_layout(codes.reshape([HALF, TILE]), OWN, assert_trivial=True)
    column = block * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
    pointers = result.out + place.to(gl.int64)[:, None] * result.stride + column[None, :]
    mask = (target < end)[:, None] & (column < result.width)[None, :]
    gl.store(pointers, gl.convert_layout(codes, layout), mask=mask)
