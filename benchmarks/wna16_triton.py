"""Plugin of the fused-MoE benchmark: the portable Triton backend of the wna16 scheme, int4 in groups of 128.

python bench.py --plugin benchmarks/wna16_triton.py --only '/int4_g128/(vllm_.*|moe_wna16_triton)' --quick
"""

from __future__ import annotations

from typing import Any


def build(weights: Any) -> Any:
    """The layer through the public interface, with one workspace for all calls."""
    import moe_core as mc
    import torch

    shape = weights.shape
    config = mc.FusedMoEConfig(num_experts=shape.E, top_k=shape.topk, hidden_size=shape.K, intermediate_size=shape.N)
    oracle = mc.oracle("wna16")
    selection = oracle.select(config, weight_key=mc.kInt4Static, activation_key=None, moe_backend="triton")
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
    silu = lambda shape: shape.act == "silu"  # noqa: E731
    peers.append(Peer("moe_wna16_triton", ("int4_g128",), build, silu))  # noqa: F821  (predefined)
