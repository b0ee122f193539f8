"""Programmatic dependent launch: a kernel's first programs start while the launch before it ends."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin_pdl(PDL: tl.constexpr):
    """Wait until the launch before has written its results, then let the next launch start its programs.

    What a kernel does before this must not depend on the launch before it.  Without PDL nothing.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_at_first(PDL: tl.constexpr):
    """For programs that end before they have waited: the first of all waits all the same.

    A launch of which no program waits may end before the launch before it, and the next one waits for this one only.
    That one may also start, and read what is older than this launch, as soon as all programs here have ended or let it.
    """
    if PDL and tl.program_id(0) == 0:
        tl.extra.cuda.gdc_wait()
