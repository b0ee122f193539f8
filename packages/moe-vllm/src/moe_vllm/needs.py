"""Checks of the vLLM internals that this package uses, run before anything is replaced."""

from __future__ import annotations

import inspect

from moe_core.api.engines import EngineChanged, require
from vllm import envs
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular, FusedMoEKernel
from vllm.platforms import current_platform

from moe_vllm.experts import MoeCoreExperts

#: variables by which users request one of vLLM's libraries
VARIABLES = ("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM", "VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE")


def check() -> None:
    """Check the used names of vLLM.

    Raises:
        EngineChanged: an interface differs from the tested one.
        AttributeError: a name is missing.
    """
    require(
        FusedMoEConfig,
        *("num_experts", "num_local_experts", "experts_per_token", "hidden_dim", "intermediate_size_per_partition"),
        *("in_dtype", "device", "has_bias", "activation", "moe_backend", "moe_parallel_config"),
        *("swiglu_limit", "swiglu_alpha", "swiglu_beta", "activation_situ_beta", "activation_situ_linear_beta"),
    )
    require(
        FusedMoEParallelConfig,
        *("enable_eplb", "use_batched_activation_format", "use_all2all_kernels", "use_ag_rs_all2all_kernels"),
        *("use_deepep_ht_kernels", "use_deepep_v2_kernels", "use_passthrough_all2all"),
    )
    tensors = [f"{part}_{kind}" for part in ("w1", "w2") for kind in ("scale", "zp", "bias")]
    require(FusedMoEQuantConfig, *tensors, "a1_scale", "a2_scale")
    require(ApplyMoEActivationConfig, "clamp_limit", "alpha", "beta")
    require(
        maybe_make_prepare_finalize, "moe", "quant_config", "routing_tables", "allow_new_interface", "use_monolithic"
    )
    require(FusedMoEKernel, "prepare_finalize", "fused_experts")
    require(type(current_platform), "is_cuda_alike", "is_fp8_fnuz")
    for variable in VARIABLES:
        envs.is_set(variable)
    check_overrides(MoeCoreExperts, FusedMoEExpertsModular)


def check_overrides(experts: type, base: type) -> None:
    """Check that a class implements vLLM's abstract methods with the base's parameters.

    Args:
        experts: class to check.
        base: vLLM's base class.

    Raises:
        EngineChanged: a method is missing or has other parameters.
    """
    require(base, "moe_config", "quant_config")
    lacking: frozenset[str] = getattr(experts, "__abstractmethods__", frozenset())
    if lacking:
        raise EngineChanged(f"{base.__qualname__} requires {', '.join(sorted(lacking))}")
    for name in vars(experts):
        theirs = getattr(base, name, None)
        if name.startswith("__") or not inspect.isroutine(theirs):
            continue
        ours = getattr(experts, name)
        asked, given = list(inspect.signature(theirs).parameters), list(inspect.signature(ours).parameters)
        if asked != given:
            raise EngineChanged(f"{base.__qualname__}.{name} takes {', '.join(asked)}, expected {', '.join(given)}")
