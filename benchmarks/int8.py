"""Plugin of the fused-MoE benchmark: the int8 oracle's choice for per-channel scales.

Activations are int8 with one scale per token, or 16-bit (W8A16, next to vLLM's Marlin).

python bench.py --plugin benchmarks/int8.py --only '/int8_channel/(vllm_triton|moe_int8)$' --out results.json
python bench.py --plugin benchmarks/int8.py --only '/int8_channel/.*_int8_w8a16' --out results.json
"""

from __future__ import annotations

import functools
from typing import Any

ACTIVATIONS = {"silu": "silu", "relu2": "relu2_no_mul"}


def build(weights: Any, *, weight_only: bool = False) -> Any:
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
    oracle = mc.oracle("int8")
    activations = None if weight_only else mc.kInt8DynamicTokenSym
    selection = oracle.select(config, weight_key=mc.kInt8StaticChannelSym, activation_key=activations)
    converted = oracle.convert(selection, w13=weights.w13, w2=weights.w2, w13_scale=weights.s13, w2_scale=weights.s2)
    kernel = oracle.make_kernel(selection, converted)
    kernel.workspace = mc.Workspace("cuda")
    kernel.workspace.take(kernel.workspaces(16384))

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return kernel.apply(x, topk_weights=w, topk_ids=ids)

    return run, {"backend": selection.backend}


def marlin(weights: Any) -> Any:
    """vLLM's Marlin with 16-bit activations."""
    from types import SimpleNamespace

    import torch
    from vllm_peers import modular_kernel, modules

    modules()
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16

    bits, codes_per_word, whole_rows = 8, 4, -1
    layer = SimpleNamespace(intermediate_size_per_partition=weights.shape.N)
    packed = [(w.view(torch.uint8) ^ 128).view(torch.int32) for w in (weights.w13, weights.w2)]
    scales = [s.flatten(1)[..., None].to(torch.bfloat16) for s in (weights.s13, weights.s2)]
    w13, w2, s13, s2, *_ = int_wna16._process_weights_marlin(
        layer, None, bits, codes_per_word, whole_rows, *packed, *scales
    )
    quant = int_wna16.make_wna16_moe_quant_config(w1_scale=s13, w2_scale=s2, group_size=whole_rows, num_bits=bits)
    return modular_kernel(weights.shape, MarlinExperts, quant, w13, w2), {}


def register(peers: list[Any]) -> None:
    ok = lambda shape: shape.act in ACTIVATIONS  # noqa: E731
    peer = Peer  # noqa: F821  (predefined)
    peers.append(peer("moe_int8", ("int8_channel",), build, ok))
    peers.append(peer("moe_int8_w8a16", ("int8_channel",), functools.partial(build, weight_only=True), ok))
    peers.append(peer("vllm_marlin_int8_w8a16", ("int8_channel",), marlin, lambda shape: shape.gated))
