"""Building blocks of test doubles for FlashInfer's TRT-LLM kernels.

They compute what FlashInfer documents from the bytes that the kernels would receive. A scheme's tests add how weights
are read and multiplied. Other tests, which run where the library is installed, check that calls match its signatures
and layouts match its helpers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from moe_core.interface.experts import FusedMoEExperts
from moe_core.runtime.kernel import FusedMoEKernel
from moe_core.spec.activation import ActivationParams, MoEActivation, apply_moe_activation
from moe_core.spec.config import FusedMoEConfig, FusedMoEParallelConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import TRITON
from moe_core.spec.routing import RoutingConfig, RoutingMethodType, route
from moe_core.spec.weights import MoEWeights
from torch import Tensor

from moe_kit.ensure import ensure

BLACKWELL = DeviceInfo.parse("sm100")
_PARAMETERS = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")


def unshuffled(w: Tensor, tile: int = 128) -> Tensor:
    """Undo the library's row shuffle, from its table: row r of a block moves to map[r].

    Args:
        w: Shuffled rows.
        tile: Tile size of the epilogue.

    Returns:
        The rows in their original order.
    """
    block = 32 if tile % 128 == 0 else 16
    source = torch.arange(block)
    place = source % (block // 8) * 8 + source // (block // 8)
    return w[(torch.arange(0, w.shape[0], block)[:, None] + place).flatten()]


def untiled(scale: Tensor) -> Tensor:
    """Undo the tiling of scales into tiles of 128 rows and 4 groups.

    Args:
        scale: Tiled scales ``[rows, groups]``.

    Returns:
        ``[rows, groups]``.
    """
    rows, groups = scale.shape
    return scale.view(rows // 128, groups // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, groups)


def activation_parameters(call: Mapping[str, Any], expert: int) -> list[float | None]:
    """Return alpha, beta and limit of one expert.

    Args:
        call: Arguments of the call by name.
        expert: The expert.

    Returns:
        The three values; None for those not given.
    """
    tensors = [call.get(name) for name in _PARAMETERS]
    return [None if tensor is None else float(tensor[expert]) for tensor in tensors]


def gated(
    up: Tensor,
    gate: Tensor,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    *,
    activation: MoEActivation = MoEActivation.SILU,
) -> Tensor:
    """Apply the library's gated activation; SwiGLU as in gpt-oss if alpha or beta is given.

    Args:
        up: Up projections.
        gate: Gate projections.
        alpha: Alpha, or None.
        beta: Beta, or None.
        limit: Clamp limit, or None.
        activation: Activation without alpha and beta.

    Returns:
        The activated values.
    """
    both = torch.cat((gate, up), 1)
    if alpha is None and beta is None:
        return apply_moe_activation(activation, both, None if limit is None else ActivationParams(limit=limit))
    params = ActivationParams(alpha=alpha, beta=0.0 if beta is None else beta, limit=limit)
    return apply_moe_activation(MoEActivation.SWIGLUOAI, both, params)


def kernel_routing(call: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Route a call whose kernel routes internally.

    Args:
        call: Arguments of the call by name.

    Returns:
        (ids, float32 weights).
    """
    method, factor = RoutingMethodType(call["routing_method_type"]), call["routed_scaling_factor"]
    groups = {}
    if method is RoutingMethodType.DeepSeekV3:
        groups = {"num_expert_group": call["n_group"], "topk_group": call["topk_group"]}
    else:
        ensure(not call["n_group"] and not call["topk_group"], "groups go with DeepSeekV3")
    if method not in (RoutingMethodType.DeepSeekV3, RoutingMethodType.MiniMax2):
        ensure(factor is None, "the kernel would not look at routed_scaling_factor")
        factor = 1.0
    config = RoutingConfig.from_method(method, routed_scaling_factor=factor, **groups)
    weights, ids = route(
        call["routing_logits"], top_k=call["top_k"], config=config, correction_bias=call["routing_bias"]
    )
    return ids, weights


def given_routing(call: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the routing that a call is given.

    Args:
        call: Arguments of the call by name.

    Returns:
        (ids, weights).
    """
    ids, weights = call["topk_ids"]
    ensure(ids.dtype is torch.int32, f"topk_ids are {ids.dtype}")
    unused = ("routing_bias", "n_group", "topk_group", "routed_scaling_factor")
    ensure(all(call[name] is None for name in unused), f"{unused} belong to calls that route")
    return ids, weights


def check_ids(call: Mapping[str, Any], ids: Tensor) -> None:
    """Check ids as the library requires: valid experts only, and a multiple of 4 experts.

    Args:
        call: Arguments of the call by name.
        ids: Expert ids.
    """
    count = call["num_experts"]
    ensure(count % 4 == 0 and count > call["top_k"], f"{count} experts for top-{call['top_k']}")
    ensure(bool(((ids >= 0) & (ids < count)).all()), f"ids from {ids.min()} to {ids.max()} for {count} experts")


def doubled(experts: type[Any], library: object, **changes: Any) -> type[Any]:
    """Replace the library of an experts class with a double.

    By default, the double is limited to few experts, since it computes them one by one.

    Args:
        experts: Experts class.
        library: The double.
        **changes: Claims to replace.

    Returns:
        The derived class.
    """
    few = min(experts.claims.max_experts, 12)
    claims = replace(experts.claims, **{"requires": (TRITON,), "max_experts": few, **changes})
    members = {"claims": claims, "library": staticmethod(lambda: library)}
    return type(f"Double{experts.__name__}", (experts,), members)


def check_ranks(experts: type[FusedMoEExperts], config: FusedMoEConfig, whole: MoEWeights) -> None:
    """Check that the results of two ranks add up to the whole layer's.

    An expert map other than the rank's must give NaN.

    Args:
        experts: Experts class of the double.
        config: The whole layer.
        whole: Weights of all experts; each rank has half of them.
    """
    torch.manual_seed(0)
    x = torch.randn(5, config.hidden_size, dtype=torch.bfloat16)
    logits = torch.randn(5, config.num_experts)

    def run(layer: FusedMoEConfig, weights: MoEWeights, expert_map: Tensor | None) -> Tensor:
        keys = {"weight_key": weights.weight_key, "activation_key": weights.activation_key}
        instance = experts(layer, device=BLACKWELL, **keys)
        kernel = FusedMoEKernel(instance, instance.convert(weights))
        return kernel.apply_monolithic(x, router_logits=logits, expert_map=expert_map).float()

    expected = run(config, whole, None)
    parts, local = [], config.num_experts // 2
    for rank in (0, 1):
        parallel = FusedMoEParallelConfig(ep_size=2, ep_rank=rank)
        layer = replace(config, num_local_experts=local, parallel=parallel)
        own = slice(local * rank, local * (rank + 1))
        tensors: dict[str, Any] = {name: tensor[own] for name, tensor in whole.tensors()}
        part = replace(whole, **tensors)
        expert_map = torch.full((config.num_experts,), -1, dtype=torch.int32)
        expert_map[own] = torch.arange(local, dtype=torch.int32)
        parts.append(run(layer, part, expert_map))
        ensure(bool(run(layer, part, expert_map.roll(1)).isnan().all()), "a rolled expert map is taken")
        expert_map[own] = torch.arange(local, dtype=torch.int32).flip(0)
        ensure(bool(run(layer, part, expert_map).isnan().all()), "an expert map in another order is taken")
    # Each sum is rounded to bfloat16 once, by at most 2^-8 of its magnitude.
    bound = (expected.abs() + parts[0].abs() + parts[1].abs()) * 2**-8
    wrong = (parts[0] + parts[1] - expected).abs() > bound + 2**-20
    ensure(not bool(wrong.any()), f"{int(wrong.sum())} elements differ from the whole layer's")
