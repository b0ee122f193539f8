"""Shared base of W8A8 and W4A8 on `moe_core.kernels.gemm.fused.scaled_mm`."""

from __future__ import annotations

from typing import Any

import torch
from moe_core import KernelWeights
from moe_core.api.experts import ScaledMMExperts


class Int8ScaledMMExperts(ScaledMMExperts):
    """int8 activations, optionally with zero points.

    Zero points need the row sums of the weights, stored as ``w13_sums`` and ``w2_sums``.
    """

    @property
    def zero_points(self) -> bool:
        return self.activation_key is not None and not self.activation_key.symmetric

    @property
    def supports_split_k(self) -> bool:
        # the row sums cover the whole mainloop
        return super().supports_split_k and not self.zero_points

    @property
    def takes_vectors(self) -> bool:
        return super().takes_vectors and not self.zero_points

    @property
    def scale_dtype(self) -> torch.dtype:
        # a scale and its zero point are stored as one word
        return torch.int64 if self.zero_points else torch.float32

    def extra_arguments(self, name: str, weights: KernelWeights) -> tuple[Any, ...]:
        sums = weights.extra.get(f"{name}_sums")
        return () if sums is None else (sums, sums.stride(0))
