"""e2m1 weights and e4m3 activations through `tl.dot_scaled` (block-scaled MMA).

    weights          uint8 [E, rows, bytes]: two codes, the even column's in the low four bits
    scales           uint8 [E, groups padded to whole steps, rows], those of a row contiguous, relative to its largest,
                     which is 127: 2^0
    channel scales   float32 [E, rows]: the row's largest scale, which multiplies the final sums
    activations      e4m3 [rows, K padded to whole steps], uint8 scales [rows, groups]

For GPUs with block-scaled MMA (sm_100 family, gfx950); elsewhere Triton converts both operands to bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from moe_core.api.kernels import INTERPRET, TileFunctions, open_blocks, open_groups, scale_acc_channels, weight_tile

#: columns that share a scale
GROUP = tl.constexpr(32)


@triton.jit
def load_codes(state, k, BLOCK_K: tl.constexpr):
    """Load an activation tile [BLOCK_M, BLOCK_K] and its scales [BLOCK_M, groups]."""
    tile = tl.load(state[0][:, None] + (k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :])
    groups = k * (BLOCK_K // GROUP) + tl.arange(0, BLOCK_K // GROUP)
    return tile, tl.load(state[1][:, None] + groups[None, :])


@triton.jit
def load_scaled(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Load weight bytes [BLOCK_N, BLOCK_K / 2] and their scales [BLOCK_N, groups]."""
    groups = k * (BLOCK_K // GROUP) + tl.arange(0, BLOCK_K // GROUP)
    scales = tl.load(state[3][:, None] + groups[None, :], mask=state[1][:, None], other=0)
    codes = weight_tile(state[0], state[1], state[2][0], b_desc, k, tl.cdiv(K, 2), BLOCK_K // 2, EVEN_N, EVEN_K)
    return codes, scales


@triton.jit
def _own(scales):
    """Copy `scales` uint8 [rows, 4] for one MMA.

    Triton 3.6 fails on sm_100 if gate and up share them.
    """
    if not INTERPRET and tl.target_info.cuda_capability_geq(10):
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [scales], dtype=tl.uint8, is_pure=False, pack=4)
    else:
        return scales


@triton.jit
def multiply_scaled(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """Compute acc + weights @ a.T with scales."""
    tl.static_assert(SWAP_AB, "weights are the rows of the product, whose number tensor cores fix")
    return tl.dot_scaled(b, b_scale, "e2m1", tl.trans(a), _own(a_scale), "e4m3", acc)


SCALED = TileFunctions(open_blocks, load_codes, open_groups, load_scaled, multiply_scaled, scale_acc_channels)
