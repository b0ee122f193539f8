"""Running sums of products whose left operand is made in registers.

`wgmma` goes on reading registers after it was started.  Triton (3.6, 3.9) leaves a step's products in flight into the
next step where nothing but the next product uses their sum, and does not keep their registers: the next step's numbers
are written over numbers that are still to be read.  With 128 columns the results are wrong, with fewer it depends on
who is faster.  A use of the sum makes Triton wait at the end of the step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.casts import INTERPRET


@triton.jit
def wait_for_mma(acc):
    """`acc`, float32 or int32, once no product reads or writes registers any more."""
    if INTERPRET:
        return acc
    elif tl.target_info.cuda_capability_geq(9) and not tl.target_info.cuda_capability_geq(10):
        # nothing, which Triton cannot know
        if acc.dtype == tl.int32:
            return tl.inline_asm_elementwise("", "=r,0", [acc], dtype=tl.int32, is_pure=True, pack=1)
        else:
            return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return acc
