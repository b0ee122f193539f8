"""FlashInfer's fused MoE: common code of the adapters of its CUTLASS and TRTLLM kernels."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from moe_core.interface.experts import FusedMoEExperts
from moe_core.spec.activation import MoEActivation

#: values of flashinfer.tllm_enums.ActivationType
ACTIVATION_TYPES = {
    MoEActivation.SILU: 3,  # Swiglu
    MoEActivation.GELU: 4,  # Geglu
    MoEActivation.GELU_TANH: 8,  # GegluTanh
    MoEActivation.SWIGLUOAI: 3,  # Swiglu with alpha, beta and limit
    MoEActivation.SWIGLUSTEP: 7,  # SwigluStep
    MoEActivation.GELU_NO_MUL: 0,  # Gelu
    MoEActivation.SILU_NO_MUL: 2,  # Silu
    MoEActivation.RELU2_NO_MUL: 6,  # Relu2
}

#: alignment in bytes of hidden states and output: the library reads and writes 16 bytes at a time
ALIGNMENT = 16


def is_aligned(rows: Tensor) -> bool:
    """Report whether the library can read or write a matrix in place.

    Args:
        rows: The matrix.

    Returns:
        Whether it is contiguous and aligned.
    """
    return rows.is_contiguous() and rows.data_ptr() % ALIGNMENT == 0


class FlashInferExperts(FusedMoEExperts):
    """Base of adapters: the library, and the layer as the library sees it.

    The first of the claims' requirements must be FlashInfer.
    """

    @classmethod
    def library(cls) -> Any:
        """Import ``flashinfer.fused_moe`` on first use."""
        cls.claims.requires[0].load()
        return importlib.import_module("flashinfer.fused_moe")

    @property
    def hidden_size(self) -> int:
        """Number of columns of w13 as the library sees them."""
        return self.config.hidden_size

    @property
    def intermediate_size(self) -> int:
        """Number of rows of gate (or up) as the library sees them."""
        return self.config.intermediate_size

    @property
    def activation_type(self) -> int:
        """The library's number of the activation."""
        return ACTIVATION_TYPES[self.config.activation]
