"""Plugin of the fused-MoE benchmark: the wna16 oracle's choice for groups of 128 columns.

Weights are int4 or int8. The benchmark's per-channel int8 weights are requantized to groups of 128 with bfloat16
scales, equally for all peers.

python bench.py --plugin benchmarks/wna16.py --only '/int4_g128/(vllm_marlin|humming|moe_wna16)' --out results.json
python bench.py --plugin benchmarks/wna16.py --only '/int8_channel/.*int8_g128' --out results.json
"""

from __future__ import annotations

import functools
from typing import Any

GROUP = 128


def quantize(weights: Any) -> tuple[Any, ...]:
    """Requantize int8 weights to groups of 128.

    Returns (w13, w2 uint8 [E, rows, columns] plus 128, s13, s2 bfloat16 [E, rows, columns / 128]).
    """
    import torch

    found = []
    for which, codes in (("w13", weights.w13), ("w2", weights.w2)):
        experts, rows, columns = codes.shape
        values = torch.empty(experts, rows, columns, dtype=torch.uint8, device=codes.device)
        scales = torch.empty(experts, rows, columns // GROUP, dtype=torch.bfloat16, device=codes.device)
        for expert in range(experts):
            groups = weights.dequant(which, expert).view(rows, columns // GROUP, GROUP)
            scales[expert] = (groups.abs().amax(dim=2) / 127.0).clamp_min(1e-8)
            numbers = (groups / scales[expert].float()[..., None]).round().clamp(-128, 127)
            values[expert] = (numbers + 128).to(torch.uint8).view(rows, columns)
        found.append((values, scales))
    (w13, s13), (w2, s2) = found
    return w13, w2, s13, s2


def build(weights: Any, backend: str) -> Any:
    """Build the layer through the public API, with one workspace for all calls."""
    import moe_core as mc
    import torch

    shape = weights.shape
    config = mc.FusedMoEConfig(
        num_experts=shape.E, top_k=shape.topk, hidden_size=shape.K, intermediate_size=shape.N, activation=shape.act
    )
    oracle = mc.oracle("wna16")
    if weights.scheme == "int4_g128":
        key = mc.kInt4Static
        w13, w2, s13, s2 = weights.w13.view(torch.uint8), weights.w2.view(torch.uint8), weights.s13, weights.s2
    else:
        key = mc.kInt8Static
        w13, w2, s13, s2 = quantize(weights)
    selection = oracle.select(config, weight_key=key, activation_key=None, moe_backend=backend)
    converted = oracle.convert(selection, w13=w13, w2=w2, w13_scale=s13, w2_scale=s2)
    kernel = oracle.make_kernel(selection, converted)
    kernel.workspace = mc.Workspace("cuda")
    kernel.workspace.take(kernel.workspaces(16384))

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return kernel.apply(x, topk_weights=w, topk_ids=ids)

    return run, {"backend": selection.backend}


def marlin(weights: Any) -> Any:
    """vLLM's Marlin with int8 weights."""
    from types import SimpleNamespace

    import torch
    from vllm_peers import modular_kernel, modules

    modules()
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16

    layer = SimpleNamespace(intermediate_size_per_partition=weights.shape.N)
    w13, w2, s13, s2 = quantize(weights)
    packed = w13.view(torch.int32), w2.view(torch.int32)
    w13, w2, s13, s2, *_ = int_wna16._process_weights_marlin(layer, None, 8, 4, GROUP, *packed, s13, s2)
    quant = int_wna16.make_wna16_moe_quant_config(w1_scale=s13, w2_scale=s2, group_size=GROUP, num_bits=8)
    return modular_kernel(weights.shape, MarlinExperts, quant, w13, w2), {}


def register(peers: list[Any]) -> None:
    peer = Peer  # noqa: F821  (the benchmark predefines Peer)
    peers.append(peer("moe_wna16", ("int4_g128",), functools.partial(build, backend="auto")))
    peers.append(peer("moe_wna16_triton", ("int4_g128",), functools.partial(build, backend="triton")))
    peers.append(peer("moe_wna16_int8_g128", ("int8_channel",), functools.partial(build, backend="auto")))
    peers.append(peer("moe_wna16_triton_int8_g128", ("int8_channel",), functools.partial(build, backend="triton")))
    peers.append(peer("vllm_marlin_int8_g128", ("int8_channel",), marlin))
