"""Synchronization for accumulators of MMAs whose left operand is in registers.

`wgmma` reads registers asynchronously after it was issued. If only the next MMA uses the sum, Triton (3.6, 3.9)
leaves the MMAs of a step in flight into the next step, but does not reserve their registers. The next step then
overwrites operands that are still to be read. With 128 columns the results are wrong; with fewer columns it is a race.
A use of the sum makes Triton wait at the end of the step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.casts import INTERPRET


@triton.jit
def wait_for_mma(acc):
    """Return `acc`, float32 or int32, once no MMA reads or writes registers any more."""
    if INTERPRET:
        return acc
    elif tl.target_info.cuda_capability_geq(9) and not tl.target_info.cuda_capability_geq(10):
        # an empty instruction, which Triton must treat as a use of the sum
        if acc.dtype == tl.int32:
            return tl.inline_asm_elementwise("", "=r,0", [acc], dtype=tl.int32, is_pure=True, pack=1)
        else:
            return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return acc
