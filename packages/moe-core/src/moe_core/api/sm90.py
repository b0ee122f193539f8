"""What packages may use of core in a k loop of the warp-specialised GEMM for sm_90; imports Triton's Gluon.

A weight names its k loop (:class:`moe_core.api.kernels.WarpSpecialisedGemm`), and the experts import it when a kernel
is made.  These are `@gluon.jit` functions and constants: import them by name, so that they are globals of the functions
that use them.  Names change their meaning, or go, with a new major :data:`moe_core.KERNEL_API` only.

**The pipeline**: TILE rows of a tile and columns of one of its two blocks, HALF rows that one consumer owns, the
LAYOUT of its product, and how it waits for the operands of a step and frees their slot.
"""

from __future__ import annotations

from moe_core.kernels.gemm.sm90.pipeline import HALF, LAYOUT, TILE, free_slot, wait_for_slot

__all__ = ["HALF", "LAYOUT", "TILE", "free_slot", "wait_for_slot"]
