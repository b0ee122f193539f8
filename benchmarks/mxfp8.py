"""Plugin of the fused-MoE benchmark: MXFP8 weights, next to what vLLM has on sm_90.

Activations are MXFP8 or 16-bit. The benchmark's per-channel weights are requantized to 1 x 32 with e8m0 scales, equally
for all peers. Errors therefore exceed MXFP8's own by those of the first quantization.

python bench.py --plugin benchmarks/mxfp8.py --only '/fp8_channel/.*mxfp8'
"""

from __future__ import annotations

import functools
from typing import Any

GROUP = 32


def quantize(weights: Any) -> tuple[Any, ...]:
    """Requantize the benchmark's weights: (w13, w2 e4m3, s13, s2 uint8 [E, rows, columns / 32])."""
    import torch

    found = []
    for which, codes in (("w13", weights.w13), ("w2", weights.w2)):
        experts, rows, columns = codes.shape
        values = torch.empty_like(codes)
        scales = torch.empty(experts, rows, columns // GROUP, dtype=torch.uint8, device=codes.device)
        for expert in range(experts):
            groups = weights.dequant(which, expert).view(rows, columns // GROUP, GROUP)
            amax = groups.abs().amax(dim=2).clamp_min(1e-10)
            exponent = torch.ceil(torch.log2(amax / 448.0))
            values[expert] = (groups / torch.exp2(exponent)[..., None]).to(torch.float8_e4m3fn).view(rows, columns)
            scales[expert] = (exponent + 127).to(torch.uint8)
        found.append((values, scales))
    (w13, s13), (w2, s2) = found
    return w13, w2, s13, s2


def build(weights: Any, backend: str = "auto", *, weight_only: bool = False) -> Any:
    """Build the layer through the public API, with one workspace for all calls."""
    import moe_core as mc
    import torch

    shape = weights.shape
    activation = {"silu": "silu", "relu2": "relu2_no_mul"}[shape.act]
    config = mc.FusedMoEConfig(
        num_experts=shape.E, top_k=shape.topk, hidden_size=shape.K, intermediate_size=shape.N, activation=activation
    )
    w13, w2, s13, s2 = quantize(weights)
    oracle = mc.oracle("fp8")
    activations = None if weight_only else mc.kMxfp8Dynamic
    selection = oracle.select(config, weight_key=mc.kMxfp8Static, activation_key=activations, moe_backend=backend)
    converted = oracle.convert(selection, w13=w13, w2=w2, w13_scale=s13, w2_scale=s2)
    kernel = oracle.make_kernel(selection, converted)
    kernel.workspace = mc.Workspace("cuda")
    kernel.workspace.take(kernel.workspaces(16384))

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return kernel.apply(x, topk_weights=w, topk_ids=ids)

    return run, {"backend": selection.backend}


def marlin(weights: Any) -> Any:
    """vLLM's Marlin with 16-bit activations, its choice for MXFP8 on sm_90."""
    from types import SimpleNamespace

    import torch
    from vllm_peers import modular_kernel, modules

    modules()
    from vllm.model_executor.layers.fused_moe.oracle import fp8

    shape, block = weights.shape, [1, GROUP]
    layer = SimpleNamespace(
        num_experts=shape.E,
        hidden_size=shape.K,
        intermediate_size_per_partition=shape.N,
        orig_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        weight_block_size=block,
    )
    kind = fp8.Fp8MoeBackend.MARLIN
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # the conversion uses the default dtype for scales
    try:
        w13, w2, s13, s2 = fp8.convert_to_fp8_moe_kernel_format(kind, layer, *quantize(weights), None, None)
    finally:
        torch.set_default_dtype(before)
    quant = fp8.make_fp8_moe_quant_config(kind, s13, s2, None, None, block_shape=block)
    return modular_kernel(shape, fp8.backend_to_kernel_cls(kind)[0], quant, w13, w2), {}


def humming(weights: Any, fp8_activations: bool = False) -> Any:
    """Humming, with MXFP8 or 16-bit activations."""
    from dataclasses import replace

    from vllm_peers import _humming, modules

    modules()
    w13, w2, s13, s2 = quantize(weights)
    scheme = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    inputs = {"dtype": "float8e4m3", "group_size": GROUP, "scale_dtype": "float8e8m0", "quant_mode": "dynamic_group"}
    return _humming(
        replace(weights, w13=w13, w2=w2, s13=s13, s2=s2),
        scheme,
        ("weight", "weight_scale"),
        inputs if fp8_activations else None,
    )


def humming_w8a8(weights: Any) -> Any:
    return humming(weights, fp8_activations=True)


def register(peers: list[Any]) -> None:
    for name, function in (
        ("moe_fp8_mxfp8", build),
        ("moe_fp8_w8a16_mxfp8", functools.partial(build, weight_only=True)),
        ("vllm_marlin_mxfp8", marlin),
        ("humming_w8a16_mxfp8", humming),
        ("humming_w8a8_mxfp8", humming_w8a8),
    ):
        peers.append(Peer(name, ("fp8_channel",), function))  # noqa: F821  (the benchmark predefines Peer)
