"""Fused routing in one kernel launch.

:func:`moe_core.spec.routing.route` is the PyTorch reference implementation, with bit-identical results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.kernels.ops._backend import use_triton
from moe_core.kernels.ops._sizes import power_of_two
from moe_core.spec.routing import RoutingConfig, call_custom, check_routing_inputs, route

#: upper limits of one tile of the kernel
MAX_EXPERTS = 1024
MAX_TOP_K = 32
#: largest number of tokens with one row per program; above it a program takes several rows, whose reductions overlap
ONE_ROW_TOKENS = 4096


def fused_route(
    router_logits: Tensor,
    *,
    top_k: int,
    config: RoutingConfig,
    correction_bias: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Select the top-k experts of each token and compute their weights in one kernel launch.

    The arguments have the meaning of :func:`moe_core.spec.routing.route`. The kernel supports up to 1024 experts and
    top-k 32. Beyond these limits, and on a CPU, ``backend="auto"`` runs the PyTorch implementation.

    Args:
        router_logits: Router logits [M, E].
        top_k: Number of experts per token.
        config: Routing method.
        correction_bias: Per-expert bias that the selection adds to the scores.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        ``(topk_weights, topk_ids)``: [M, k] float32 and [M, k] int32, best expert first.
    """
    check_routing_inputs(router_logits, top_k=top_k, config=config, correction_bias=correction_bias)
    if config.custom is not None:
        return call_custom(router_logits, top_k=top_k, config=config)
    tokens, experts = router_logits.shape
    block_s = power_of_two(experts // config.groups)
    block_g = power_of_two(config.groups)
    unsupported = None
    if block_s * block_g > 2 * MAX_EXPERTS or experts > MAX_EXPERTS or top_k > MAX_TOP_K:
        unsupported = f"{experts} experts in {config.groups} groups (at most {MAX_EXPERTS}), top_k {top_k} (at most 32)"
    if not use_triton(router_logits, backend, unsupported=unsupported):
        return route(router_logits, top_k=top_k, config=config, correction_bias=correction_bias)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=router_logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=router_logits.device)
    if tokens == 0:
        return weights, ids
    from moe_core.kernels.launch.launch import launch
    from moe_core.kernels.ops._routing_kernels import route_kernel

    if (experts - 1) * router_logits.stride(1) >= 2**31:
        # the kernel computes offsets of logits within a row in 32 bits
        router_logits = router_logits.contiguous()
    # a program has one warp
    rows = 1 if tokens <= ONE_ROW_TOKENS else max(1, min(4, 1024 // (block_s * block_g)))
    bias = correction_bias.contiguous() if correction_bias is not None else None
    launch(
        route_kernel,
        (-(-tokens // rows),),
        router_logits,
        bias,
        weights,
        ids,
        tokens,
        router_logits.stride(0),
        router_logits.stride(1),
        config.routed_scaling_factor,
        EXPERTS=experts,
        TOP_K=top_k,
        SCORING=config.scoring_func,
        RENORMALIZE=config.renormalize,
        SELECTED_ONLY=config.score_selected_only,
        HAS_BIAS=bias is not None,
        GROUPS=config.groups,
        TOPK_GROUP=config.topk_group if config.is_grouped else 1,
        PACK=bias is None and router_logits.dtype is not torch.float32,
        ROWS=rows,
        BLOCK_G=block_g,
        BLOCK_S=block_s,
        BLOCK_K=power_of_two(top_k),
        num_warps=1,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return weights, ids
