"""Plugin of the fused-MoE benchmark: the block-FP8 layer of `moe_fp8.kernels` as an implementation of `fp8_block`.

python bench.py --plugin benchmarks/fp8_block.py --only '/fp8_block/(vllm_triton|moe_fp8)' --out results.json
"""

from __future__ import annotations

from typing import Any


def build(weights: Any) -> Any:
    """The layer with the launch parameters of `moe_core.gemm.rule`; scratch memory is allocated once."""
    import torch
    from moe_core.workspace import Workspace
    from moe_fp8.kernels.block_moe import block_fp8_fused_moe
    from moe_fp8.kernels.workspaces import block_fp8_workspaces

    shape = weights.shape
    workspace = Workspace("cuda")

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        specs = block_fp8_workspaces(x.shape[0], shape.topk, shape.E, shape.K, shape.N, x.dtype)
        out = torch.empty_like(x)
        block_fp8_fused_moe(
            x, weights.w13, weights.w2, w13_scale=weights.s13, w2_scale=weights.s2, topk_weights=w, topk_ids=ids,
            out=out, workspace=workspace.take(specs),
        )  # fmt: skip
        return out

    workspace.take(block_fp8_workspaces(16384, shape.topk, shape.E, shape.K, shape.N, torch.bfloat16))
    return run


def register(peers: list[Any]) -> None:
    peers.append(Peer("moe_fp8", ("fp8_block",), build))  # noqa: F821  (the benchmark predefines Peer)
