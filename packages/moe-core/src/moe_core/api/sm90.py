"""The part of core for mainloops of the warp-specialized sm_90 GEMM; imports Triton's Gluon.

A weight names its mainloop (:class:`moe_core.api.kernels.WarpSpecializedGemm`); the experts import it when a kernel is
built. These are `@gluon.jit` functions and constants. Import them by name, so that they are globals of the functions
that use them. Names change meaning or are removed only with a new major version of :data:`moe_core.KERNEL_API`.

**The pipeline**: TILE is the number of rows of a tile and of columns of one of its two blocks. HALF is the number of
rows that one consumer owns, and LAYOUT the layout of its product. Two functions wait for the operands of a step and
free their slot.
"""

from __future__ import annotations

from moe_core.kernels.gemm.sm90.pipeline import HALF, LAYOUT, TILE, free_slot, wait_for_slot

__all__ = ["HALF", "LAYOUT", "TILE", "free_slot", "wait_for_slot"]
