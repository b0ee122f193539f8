"""Programmatic dependent launch (PDL).

The first programs of a kernel start while the previous launch ends.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin_pdl(PDL: tl.constexpr):
    """Wait for the results of the previous launch, then allow the next launch to start.

    Work before this call must not depend on the previous launch. Without PDL it does nothing.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_at_first(PDL: tl.constexpr):
    """Let program 0 wait, for programs that exit before they have waited.

    A launch in which no program waits may end before the previous launch, and the next launch waits for this one only.
    The next launch may also start, and read data older than this launch, once all programs here have exited or allow
    it.
    """
    if PDL and tl.program_id(0) == 0:
        tl.extra.cuda.gdc_wait()
