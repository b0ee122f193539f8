"""Plugin of the fused-MoE benchmark: the fp8 oracle's choice for channel and tensor scales.

python bench.py --plugin benchmarks/fp8_channel_tensor.py --only '/fp8_(channel|tensor)/(vllm_triton|moe_fp8)'

`fp8_channel` has dynamic scales per token, `fp8_tensor` one dynamic scale for all activations.
"""

from __future__ import annotations

from typing import Any

ACTIVATIONS = {"silu": "silu", "relu2": "relu2_no_mul"}


def build(weights: Any) -> Any:
    """Build the layer through the public API, with one workspace for all calls."""
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
    if weights.scheme == "fp8_channel":
        keys = (mc.kFp8StaticChannelSym, mc.kFp8DynamicTokenSym)
        scales = (weights.s13, weights.s2)
    else:
        keys = (mc.kFp8StaticTensorSym, mc.kFp8DynamicTensorSym)
        # gate and up have separate scales, which are equal here
        parts = 2 if config.is_gated else 1
        scales = (weights.s13.view(-1, 1).expand(-1, parts).contiguous(), weights.s2.view(-1, 1))
    oracle = mc.oracle("fp8")
    selection = oracle.select(config, weight_key=keys[0], activation_key=keys[1])
    converted = oracle.convert(selection, w13=weights.w13, w2=weights.w2, w13_scale=scales[0], w2_scale=scales[1])
    kernel = oracle.make_kernel(selection, converted)
    kernel.workspace = mc.Workspace("cuda")
    kernel.workspace.take(kernel.workspaces(16384))

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return kernel.apply(x, topk_weights=w, topk_ids=ids)

    return run, {"backend": selection.backend}


def register(peers: list[Any]) -> None:
    ok = lambda shape: shape.act in ACTIVATIONS  # noqa: E731
    peers.append(Peer("moe_fp8", ("fp8_channel", "fp8_tensor"), build, ok))  # noqa: F821  (predefined)
