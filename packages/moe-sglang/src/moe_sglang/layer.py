"""Conversion of SGLang's layer configuration to moe-core's."""

from __future__ import annotations

import math
from typing import Any

import torch
from moe_core import ActivationParams, ConfigError, FusedMoEConfig, MoEActivation

#: activations of SGLang's kernel without parameters, by (name, gated)
_PLAIN = {
    ("gelu", True): MoEActivation.GELU,
    ("gelu_tanh", True): MoEActivation.GELU_TANH,
    ("silu", False): MoEActivation.SILU_NO_MUL,
    ("gelu", False): MoEActivation.GELU_NO_MUL,
    ("relu2", False): MoEActivation.RELU2_NO_MUL,
}


def layer_config(
    runner: Any, info: Any, *, top_k: int, hidden_size: int, dtype: torch.dtype, batch_invariant: bool = False
) -> FusedMoEConfig:
    """Convert SGLang's layer configuration on this rank.

    Experts are the local ones: SGLang's dispatcher uses local ids, and -1 for experts of other ranks.

    Args:
        runner: SGLang's MoeRunnerConfig.
        info: SGLang's description of the weights.
        top_k: experts per token.
        hidden_size: K.
        dtype: dtype of the hidden states.
        batch_invariant: results must not depend on the batch.

    Returns:
        The configuration for moe-core.

    Raises:
        ConfigError: moe-core does not support the configuration.
    """
    if runner.no_combine:
        raise ConfigError("no_combine (separate outputs of experts) is not supported")
    if (info.b13 is None) != (info.b2 is None):
        raise ConfigError("w13 and w2 must both have biases or none")
    activation, params = _activation(runner)
    rows = int(info.w13_weight.shape[1])
    return FusedMoEConfig(
        num_experts=int(info.w13_weight.shape[0]),
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=rows // 2 if activation.is_gated else rows,
        activation=activation,
        activation_params=params,
        dtype=dtype,
        has_bias=info.b13 is not None,
        apply_router_weight_on_input=bool(runner.apply_router_weight_on_input),
        batch_invariant=batch_invariant,
    )


def _activation(runner: Any) -> tuple[MoEActivation, ActivationParams | None]:
    """Return the activation and its parameters, following the branches of SGLang's kernel."""
    name, gated = str(runner.activation), bool(runner.is_gated)
    alpha, limit, clamp = runner.gemm1_alpha, runner.gemm1_clamp_limit, runner.swiglu_limit
    if (name, gated) == ("silu", True):
        if alpha is not None:
            if runner.gate_up_interleaved:
                raise ConfigError("interleaved gate and up rows (gate_up_interleaved) are not supported")
            if limit is None:
                raise ConfigError("silu with gemm1_alpha needs a gemm1_clamp_limit, got None")
            return MoEActivation.SWIGLUOAI, ActivationParams(alpha=alpha, beta=1.0, limit=limit)
        if limit is not None:
            return MoEActivation.SWIGLUSTEP, ActivationParams(limit=limit)
        return MoEActivation.SILU, ActivationParams(limit=clamp)
    if (name, gated) == ("situ", True):
        beta = 4.0 if alpha is None else alpha
        return MoEActivation.SITU, ActivationParams(beta=beta, limit=math.inf if limit is None else limit)
    if (name, gated) not in _PLAIN:
        raise ConfigError(f"activation {name}{'' if gated else ' without a gate'} is not supported by moe-core")
    if not (alpha is None and limit is None and clamp is None):
        raise ConfigError(f"activation {name} has parameters, which SGLang does not define for it")
    return _PLAIN[name, gated], None
