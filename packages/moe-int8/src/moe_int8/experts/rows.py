"""What W8A8 and W4A8 share on `moe_core.gemm.rows_moe`: int8 activations, with zero points or without."""

from __future__ import annotations

from typing import Any

import torch
from moe_core import KernelWeights
from moe_core.gemm.experts import RowExperts
from torch import Tensor


class Int8RowExperts(RowExperts):
    """int8 activations; with zero points, sums of the weights' rows are kept as ``w13_sums`` and ``w2_sums``."""

    element = torch.int8

    @property
    def zero_points(self) -> bool:
        return self.activation_key is not None and not self.activation_key.symmetric

    @property
    def shares_loops(self) -> bool:
        # the sums of rows are those of the whole k loop
        return super().shares_loops and not self.zero_points

    @property
    def scale_dtype(self) -> torch.dtype:
        # a scale and its zero point travel as one
        return torch.int64 if self.zero_points else torch.float32

    def extras(self, weights: KernelWeights) -> dict[str, Any]:
        return {name: _sums(weights.extra.get(f"{name[:-6]}_sums")) for name in ("w13_extra", "w2_extra")}


def _sums(sums: Tensor | None) -> tuple[Any, ...]:
    return () if sums is None else (sums, sums.stride(0))
