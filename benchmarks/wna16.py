"""Plugin of the fused-MoE benchmark: what the wna16 oracle selects for int4 weights in groups of 128 columns.

python bench.py --plugin benchmarks/wna16.py --only '/int4_g128/(vllm_marlin|humming|moe_wna16)' --out results.json
"""

from __future__ import annotations

import functools
from typing import Any


def build(weights: Any, backend: str) -> Any:
    """The layer through the public interface, with one workspace for all calls."""
    import moe_core as mc
    import torch

    shape = weights.shape
    config = mc.FusedMoEConfig(
        num_experts=shape.E, top_k=shape.topk, hidden_size=shape.K, intermediate_size=shape.N, activation=shape.act
    )
    oracle = mc.oracle("wna16")
    selection = oracle.select(config, weight_key=mc.kInt4Static, activation_key=None, moe_backend=backend)
    converted = oracle.convert(
        selection,
        w13=weights.w13.view(torch.uint8),
        w2=weights.w2.view(torch.uint8),
        w13_scale=weights.s13,
        w2_scale=weights.s2,
    )
    kernel = oracle.make_kernel(selection, converted)
    kernel.workspace = mc.Workspace("cuda")
    kernel.workspace.take(kernel.workspaces(16384))

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return kernel.apply(x, topk_weights=w, topk_ids=ids)

    return run, {"backend": selection.backend}


def register(peers: list[Any]) -> None:
    peer = Peer  # noqa: F821  (the benchmark predefines Peer)
    peers.append(peer("moe_wna16", ("int4_g128",), functools.partial(build, backend="auto")))
    peers.append(peer("moe_wna16_triton", ("int4_g128",), functools.partial(build, backend="triton")))
