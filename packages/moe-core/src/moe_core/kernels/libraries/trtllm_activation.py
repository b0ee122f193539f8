"""Activation parameters in the form that FlashInfer's TRTLLM kernels take."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_core.spec.activation import MoEActivation
from moe_core.spec.config import FusedMoEConfig


def trtllm_activation_parameters(config: FusedMoEConfig, experts: int, device: torch.device) -> dict[str, Tensor]:
    """Create the per-expert parameters of a gated activation.

    Args:
        config: Configuration of the layer.
        experts: Number of experts.
        device: Device of the tensors.

    Returns:
        Tensors [E] float32 by the library's names, for the parameters that the activation has.
    """
    params = config.params
    wanted = {"gemm1_clamp_limit": params.limit}
    if config.activation is MoEActivation.SWIGLUOAI:
        wanted |= {"gemm1_alpha": params.alpha, "gemm1_beta": params.beta}
    return {
        name: torch.full((experts,), value, dtype=torch.float32, device=device)
        for name, value in wanted.items()
        if value is not None
    }


def trtllm_activation_arguments(parameters: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Complete the parameters of a gated activation, for functions that require all of them.

    Args:
        parameters: Result of :func:`trtllm_activation_parameters`.

    Returns:
        All parameters; None for those that the activation does not have.
    """
    return {name: parameters.get(name) for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")}
