"""A fused MoE layer, FP8 with scales per channel or tensor of the weights, per token or tensor of the activations."""

from __future__ import annotations

from typing import Any

from moe_core.gemm.rows_moe import ActivationScales, row_fused_moe
from torch import Tensor

from moe_fp8.kernels.rows import E4M3

__all__ = ["ActivationScales", "row_fp8_fused_moe"]


def row_fp8_fused_moe(x: Tensor, w13: Tensor, w2: Tensor, **arguments: Any) -> None:
    """:func:`moe_core.gemm.rows_moe.row_fused_moe` of e4m3."""
    row_fused_moe(E4M3, x, w13, w2, **arguments)
