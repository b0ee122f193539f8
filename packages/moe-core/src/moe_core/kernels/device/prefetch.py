"""Requests for bytes that are loaded later: into L2, where loads take a third of the time."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.casts import INTERPRET


@triton.jit
def prefetch_l2(pointers, inside):
    """Ask for the sector of each of `pointers` where `inside` (of that shape, or a scalar) is not 0.

    CUDA only: elsewhere nothing.
    """
    if not INTERPRET and tl.target_info.is_cuda():
        tl.inline_asm_elementwise(
            "{ .reg .pred %p; setp.ne.s32 %p, $2, 0; @%p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r",
            [pointers.to(tl.int64), inside + tl.zeros(pointers.shape, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
