"""What packages may use of core in a k loop of the warp-specialised GEMM for sm_90; imports Triton's Gluon.

A weight names its k loop (:class:`moe_core.kernel_api.WarpSpecialisedGemm`), and the experts import it when a kernel is
made.  These are `@gluon.jit` functions and constants: import them by name, so that they are globals of the functions
that use them.  Names change their meaning, or go, with a new :data:`moe_core.PROTOCOL_VERSION` only.

**The pipeline**: TILE rows of a tile and columns of one of its two blocks, HALF rows that one consumer owns, and the
``barrier`` among the warps of one, under the name that the installed Triton has.

**int8 operands** whose scales do not change along k: the whole k loop, and what it is made of.
"""

from __future__ import annotations

from moe_core.gemm.hopper_pipeline import HALF, TILE, barrier
from moe_core.gemm.hopper_scaled_mm import (
    accumulate_int8,
    column_scales,
    marked_rows,
    row_scales,
    scaled_mm_int8,
)

__all__ = [
    # the pipeline
    "HALF",
    "TILE",
    "barrier",
    # int8 operands
    "accumulate_int8",
    "column_scales",
    "marked_rows",
    "row_scales",
    "scaled_mm_int8",
]
