"""Base of experts of 8-bit elements whose scales do not change along k; imports no Triton."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_core.errors import TensorError
from moe_core.kernels.experts.scaled_gemv import ScaledGemvExperts
from moe_core.spec.weights import KernelWeights

if TYPE_CHECKING:
    from moe_core.kernels.gemm.fused.scaled_mm import Granularity, ScaledMMFunctions, ScaledMMScheme
    from moe_core.kernels.gemm.tiles.launch import GemmWeight


def quantizes_while_loading(capability: int) -> bool:
    """Whether a conversion may stand between load and product.

    Triton 3.6 cannot pipeline such a loop for sm_100.

    Args:
        capability: Compute capability; 0 without an NVIDIA GPU.

    Returns:
        False for sm_100 to sm_119.
    """
    return not 100 <= capability < 120


class ScaledMMExperts(ScaledGemvExperts):
    """Experts of 8-bit elements whose scales do not change along k.

    See `moe_core.kernels.gemm.fused.scaled_mm`.
    """

    family = "scaled_mm"
    #: spilled values: tile coordinates outside the mainloop; rows that are unaligned for 16-byte copies
    accepted_spills = (256, 256)

    @property
    def granularity(self) -> Granularity:
        """Granularity of the activation scales, from the activation key."""
        key = self.activation_key
        if key is not None and key.is_static:
            return "static"
        if key is None or not (key.group_shape.is_per_row or key.group_shape.is_per_tensor):
            raise TensorError(f"activation_key {key} is not supported; expected scales per token, per tensor or static")
        return "token" if key.group_shape.is_per_row else "tensor"

    @property
    @abstractmethod
    def functions(self) -> ScaledMMFunctions:
        """Device functions of the element type."""

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the activation scales in the workspace."""
        return torch.float32

    def static_scales(self, weights: KernelWeights) -> tuple[Tensor | None, Tensor | None]:
        """Return the static scales of x and h.

        Args:
            weights: Weights of the layer.

        Returns:
            Scales [E] each.
        """
        return weights.quant_config.a1_scale, weights.quant_config.a2_scale

    @property
    def takes_vectors(self) -> bool:
        # no program sees all tokens, which a scale per tensor covers; static scales are for weighted hidden states
        own = self.granularity == "token" or not self.config.apply_router_weight_on_input
        return super().takes_vectors and self.granularity != "tensor" and own

    def vector_scales(self, weights: KernelWeights) -> tuple[Tensor | None, Tensor | None]:
        return self.static_scales(weights) if self.granularity == "static" else (None, None)

    def extra_arguments(self, name: str, weights: KernelWeights) -> tuple[Any, ...]:
        """Return additional arguments of the scheme's device functions for one weight.

        Args:
            name: "w13" or "w2".
            weights: Weights of the layer.

        Returns:
            The arguments.
        """
        return ()

    def activation_scheme(self, weights: KernelWeights | None) -> ScaledMMScheme:
        from moe_core.kernels.gemm.fused.scaled_mm import ScaledMMScheme

        static = weights is not None and self.granularity == "static"
        x, h = self.static_scales(weights) if static and weights is not None else (None, None)
        on_load = quantizes_while_loading(self.device_info.capability)
        return ScaledMMScheme(self.functions, self.granularity, x, h, self.scale_dtype, on_load)

    def gemm_weight(self, name: str, weights: KernelWeights) -> GemmWeight:
        tensor, extra = weights.w13 if name == "w13" else weights.w2, self.extra_arguments(name, weights)
        return self.functions.weight(tensor, *self.scales(name, weights), *self.sizes(name), extra=extra)
