"""Conversion of vLLM's layer configuration to moe-core's."""

from __future__ import annotations

from typing import Any

from moe_core import ActivationParams, ConfigError, FusedMoEConfig, MoEActivation

#: activations without parameters in vLLM's kernels that moe-core computes identically
_PLAIN = frozenset(
    {"gelu", "gelu_tanh", "swiglustep", "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul"}
)


def layer_config(moe: Any, *, has_bias: bool | None = None, params: Any = None) -> FusedMoEConfig:
    """Convert vLLM's layer configuration on this rank.

    Parallelism is not included, since vLLM moves the tokens.

    Args:
        moe: vLLM's FusedMoEConfig.
        has_bias: whether experts have biases; by default as ``moe`` states.
        params: ApplyMoEActivationConfig of the activation, if known.

    Returns:
        The configuration for moe-core.

    Raises:
        ConfigError: moe-core does not support the configuration.
    """
    activation, activation_params = _activation(moe, params)
    return FusedMoEConfig(
        num_experts=moe.num_experts,
        num_local_experts=moe.num_local_experts,
        top_k=moe.experts_per_token,
        hidden_size=moe.hidden_dim,
        intermediate_size=moe.intermediate_size_per_partition,
        activation=activation,
        activation_params=activation_params,
        dtype=moe.in_dtype,
        has_bias=moe.has_bias if has_bias is None else has_bias,
    )


def _activation(moe: Any, params: Any) -> tuple[MoEActivation, ActivationParams | None]:
    name = str(moe.activation.value)
    if params is None:
        limit, alpha, beta = moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta
    else:
        limit, alpha, beta = params.clamp_limit, params.alpha, params.beta
    if name == "silu":
        return MoEActivation.SILU, ActivationParams(limit=limit)
    if name == "swigluoai":
        # vLLM's kernels hard-code the parameters
        return MoEActivation.SWIGLUOAI, None
    if name == "swigluoai_uninterleave":
        if limit is None:
            raise ConfigError("activation swigluoai_uninterleave needs a clamp limit, got None")
        alpha, beta = (1.0 if alpha is None else alpha), (0.0 if beta is None else beta)
        return MoEActivation.SWIGLUOAI, ActivationParams(alpha=alpha, beta=beta, limit=limit)
    if name == "situ":
        beta, linear_beta = moe.activation_situ_beta, moe.activation_situ_linear_beta
        if beta is None:
            raise ConfigError("activation situ needs a beta, got None")
        return MoEActivation.SITU, ActivationParams(beta=beta, limit=linear_beta)
    if name not in _PLAIN:
        raise ConfigError(f"activation {name} is not supported by moe-core")
    if limit is not None and name != "swiglustep":
        raise ConfigError(f"activation {name} has the clamp limit {limit}, which vLLM does not define for it")
    return MoEActivation.parse(name), None
