"""Plugin of the fused-MoE benchmark: the mxfp4 oracle's choice for gpt-oss layers.

Activations are 16-bit or FP8.

python bench.py --plugin benchmarks/mxfp4.py --only '/mxfp4/(vllm_(triton_kernels|marlin)|moe_)' --out results.json
"""

from __future__ import annotations

import functools
from typing import Any


def build(weights: Any, backend: str, activation_key: str | None = None) -> Any:
    """Build the layer through the public API, with one workspace for all calls."""
    import moe_core as mc
    import torch
    from moe_mxfp4.layout import deinterleave

    shape = weights.shape
    activation = {"silu": "silu", "swigluoai": "swigluoai", "relu2": "relu2_no_mul"}[shape.act]
    gpt_oss = shape.act == "swigluoai"
    config = mc.FusedMoEConfig(
        num_experts=shape.E,
        top_k=shape.topk,
        hidden_size=shape.K,
        intermediate_size=shape.N,
        activation=activation,
        activation_params=mc.ActivationParams(alpha=1.702, beta=1.0, limit=7.0) if gpt_oss else None,
        has_bias=weights.b13 is not None,
    )
    oracle = mc.oracle("mxfp4")
    key = None if activation_key is None else getattr(mc, activation_key)
    selection = oracle.select(config, weight_key=mc.kMxfp4Static, activation_key=key, moe_backend=backend)

    def in_order(tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Put gate rows before up rows."""
        return deinterleave(tensor) if gpt_oss and tensor is not None else tensor

    converted = oracle.convert(
        selection,
        w13=in_order(weights.w13),
        w2=weights.w2,
        w13_scale=in_order(weights.s13),
        w2_scale=weights.s2,
        w13_bias=in_order(weights.b13),
        w2_bias=weights.b2,
    )
    kernel = oracle.make_kernel(selection, converted)
    kernel.workspace = mc.Workspace("cuda")
    kernel.workspace.take(kernel.workspaces(16384))

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return kernel.apply(x, topk_weights=w, topk_ids=ids)

    return run, {"backend": selection.backend}


def register(peers: list[Any]) -> None:
    peer = Peer  # noqa: F821  (the benchmark predefines Peer)
    peers.append(peer("moe_mxfp4", ("mxfp4",), functools.partial(build, backend="auto")))
    peers.append(peer("moe_mxfp4_triton", ("mxfp4",), functools.partial(build, backend="triton")))
    # has another precision than its peers and is not ranked among them
    fp8 = functools.partial(build, backend="auto", activation_key="kFp8DynamicTokenSym")
    peers.append(peer("moe_mxfp4_fp8", ("mxfp4",), fp8))
