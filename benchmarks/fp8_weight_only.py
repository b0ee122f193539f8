"""Plugin of the fused-MoE benchmark: weight-only FP8, next to vLLM's Marlin and Humming.

python bench.py --plugin benchmarks/fp8_weight_only.py --only 'w8a16'
"""

from __future__ import annotations

import functools
from typing import Any

BLOCK = (128, 128)


def build(weights: Any, backend: str) -> Any:
    """Build the layer through the public API, with one workspace for all calls."""
    import moe_core as mc
    import torch

    shape = weights.shape
    key = {
        "fp8_channel": mc.kFp8StaticChannelSym,
        "fp8_tensor": mc.kFp8StaticTensorSym,
        "fp8_block": mc.kFp8Static128BlockSym,
    }[weights.scheme]
    activation = {"silu": "silu", "relu2": "relu2_no_mul"}[shape.act]
    config = mc.FusedMoEConfig(
        num_experts=shape.E, top_k=shape.topk, hidden_size=shape.K, intermediate_size=shape.N, activation=activation
    )
    s13, s2 = weights.s13, weights.s2
    if weights.scheme == "fp8_tensor":
        s13, s2 = s13[:, None].repeat(1, 2 if shape.gated else 1), s2[:, None].contiguous()
    oracle = mc.oracle("fp8")
    selection = oracle.select(config, weight_key=key, activation_key=None, moe_backend=backend)
    converted = oracle.convert(selection, w13=weights.w13, w2=weights.w2, w13_scale=s13, w2_scale=s2)
    kernel = oracle.make_kernel(selection, converted)
    kernel.workspace = mc.Workspace("cuda")
    kernel.workspace.take(kernel.workspaces(16384))

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return kernel.apply(x, topk_weights=w, topk_ids=ids)

    return run, {"backend": selection.backend}


def marlin(weights: Any) -> Any:
    """vLLM's Marlin, its choice for weight-only FP8 on sm_90."""
    from types import SimpleNamespace

    import torch
    from vllm_peers import modular_kernel, modules

    modules()
    from vllm.model_executor.layers.fused_moe.oracle import fp8

    shape, block = weights.shape, list(BLOCK) if weights.scheme == "fp8_block" else None
    layer = SimpleNamespace(
        num_experts=shape.E,
        hidden_size=shape.K,
        intermediate_size_per_partition=shape.N,
        orig_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
    )
    if block is not None:
        layer.weight_block_size = block
    kind = fp8.Fp8MoeBackend.MARLIN
    w13, w2, s13, s2 = fp8.convert_to_fp8_moe_kernel_format(
        kind, layer, weights.w13, weights.w2, weights.s13, weights.s2, None, None
    )
    quant = fp8.make_fp8_moe_quant_config(kind, s13, s2, None, None, block_shape=block)
    return modular_kernel(shape, fp8.backend_to_kernel_cls(kind)[0], quant, w13, w2), {}


def humming(weights: Any) -> Any:
    """Humming with 16-bit activations."""
    from vllm_peers import COMPRESSED, _humming, fp8_block_humming, modules

    modules()
    if weights.scheme == "fp8_block":
        return fp8_block_humming(weights, fp8_activations=False)
    scheme = {"format": "float-quantized", "type": "float", "num_bits": 8, "strategy": "channel"}
    return _humming(weights, {**COMPRESSED, **scheme}, ("weight", "weight_scale"))


def register(peers: list[Any]) -> None:
    peer = Peer  # noqa: F821  (the benchmark predefines Peer)
    schemes = ("fp8_channel", "fp8_block", "fp8_tensor")
    peers.append(peer("moe_fp8_w8a16", schemes, functools.partial(build, backend="auto")))
    peers.append(peer("vllm_marlin_w8a16", schemes, marlin))
    peers.append(peer("humming_w8a16_channel", ("fp8_channel",), humming))
