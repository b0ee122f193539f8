"""Parameters of the activation, as FlashInfer's TRTLLM kernels take them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_core.spec.activation import MoEActivation
from moe_core.spec.config import FusedMoEConfig


def trtllm_activation_parameters(config: FusedMoEConfig, experts: int, device: torch.device) -> dict[str, Tensor]:
    """Per-expert parameters [E] float32 of a gated activation, by the library's names; none that it has not."""
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
    """All parameters of a gated activation, for functions in which they have no default: None that it has not."""
    return {name: parameters.get(name) for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")}
