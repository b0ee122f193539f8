"""Plugin of the fused-MoE benchmark: what the int8 oracle selects for scales per channel and per token.

python bench.py --plugin benchmarks/int8.py --only '/int8_channel/(vllm_triton|moe_int8)' --out results.json
"""

from __future__ import annotations

from typing import Any

ACTIVATIONS = {"silu": "silu", "relu2": "relu2_no_mul"}


def build(weights: Any) -> Any:
    """The layer through the public interface, with one workspace for all calls."""
    import moe_core as mc
    import torch

    shape = weights.shape
    config = mc.FusedMoEConfig(
        num_experts=shape.E,
        top_k=shape.topk,
        hidden_size=shape.K,
        intermediate_size=shape.N,
        activation=mc.MoEActivation(ACTIVATIONS[shape.act]),
    )
    oracle = mc.oracle("int8")
    selection = oracle.select(config, weight_key=mc.kInt8StaticChannelSym, activation_key=mc.kInt8DynamicTokenSym)
    converted = oracle.convert(selection, w13=weights.w13, w2=weights.w2, w13_scale=weights.s13, w2_scale=weights.s2)
    kernel = oracle.make_kernel(selection, converted)
    kernel.workspace = mc.Workspace("cuda")
    kernel.workspace.take(kernel.workspaces(16384))

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return kernel.apply(x, topk_weights=w, topk_ids=ids)

    return run, {"backend": selection.backend}


def register(peers: list[Any]) -> None:
    ok = lambda shape: shape.act in ACTIVATIONS  # noqa: E731
    peers.append(Peer("moe_int8", ("int8_channel",), build, ok))  # noqa: F821  (predefined)
