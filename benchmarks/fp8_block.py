"""Plugin of the fused-MoE benchmark: the layer that the fp8 oracle selects for `fp8_block`.

python bench.py --plugin benchmarks/fp8_block.py --only '/fp8_block/(vllm_triton|moe_fp8)' --out results.json
"""

from __future__ import annotations

from typing import Any


def build(weights: Any) -> Any:
    """Build the layer through the public API, with one workspace for all calls."""
    import moe_core as mc
    import torch

    shape = weights.shape
    config = mc.FusedMoEConfig(
        num_experts=shape.E, top_k=shape.topk, hidden_size=shape.K, intermediate_size=shape.N, activation=shape.act
    )
    oracle = mc.oracle("fp8")
    selection = oracle.select(config, weight_key=mc.kFp8Static128BlockSym, activation_key=mc.kFp8Dynamic128Sym)
    converted = oracle.convert(selection, w13=weights.w13, w2=weights.w2, w13_scale=weights.s13, w2_scale=weights.s2)
    kernel = oracle.make_kernel(selection, converted)
    kernel.workspace = mc.Workspace("cuda")
    kernel.workspace.take(kernel.workspaces(16384))

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return kernel.apply(x, topk_weights=w, topk_ids=ids)

    return run, {"backend": selection.backend}


def register(peers: list[Any]) -> None:
    peers.append(Peer("moe_fp8", ("fp8_block",), build))  # noqa: F821  (the benchmark predefines Peer)
