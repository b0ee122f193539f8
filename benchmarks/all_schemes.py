"""Plugin of the fused-MoE benchmark: every scheme's selected layer, next to all peers.

python bench.py --plugin benchmarks/all_schemes.py --shapes benchmarks/all_shapes.py --warm --jobs 14
python bench.py --plugin benchmarks/all_schemes.py --shapes benchmarks/all_shapes.py --out results.json
"""

from __future__ import annotations

from typing import Any

NAMES = {
    "fp8_block": "moe_fp8",
    "fp8_channel": "moe_fp8",
    "int8_channel": "moe_int8",
    "int4_g128": "moe_wna16",
    "mxfp4": "moe_mxfp4",
}
KEYS = {  # oracle, weight key, activation key
    "fp8_block": ("fp8", "kFp8Static128BlockSym", "kFp8Dynamic128Sym"),
    "fp8_channel": ("fp8", "kFp8StaticChannelSym", "kFp8DynamicTokenSym"),
    "int8_channel": ("int8", "kInt8StaticChannelSym", "kInt8DynamicTokenSym"),
    "int4_g128": ("wna16", "kInt4Static", None),
    "mxfp4": ("mxfp4", "kMxfp4Static", None),
}
ACTIVATIONS = {"silu": "silu", "relu2": "relu2_no_mul", "swigluoai": "swigluoai"}


def select(shape: Any, scheme: str) -> tuple[Any, Any]:
    """Return (oracle, selection) of a layer.

    Args:
        shape: the benchmark's shape.
        scheme: the benchmark's scheme.
    """
    import moe_core as mc

    gpt_oss = shape.act == "swigluoai"
    config = mc.FusedMoEConfig(
        num_experts=shape.E,
        top_k=shape.topk,
        hidden_size=shape.K,
        intermediate_size=shape.N,
        activation=mc.MoEActivation(ACTIVATIONS[shape.act]),
        activation_params=mc.ActivationParams(alpha=1.702, beta=1.0, limit=7.0) if gpt_oss else None,
        has_bias=gpt_oss,
    )
    name, weight, activation = KEYS[scheme]
    oracle = mc.oracle(name)
    activation_key = None if activation is None else getattr(mc, activation)
    return oracle, oracle.select(config, weight_key=getattr(mc, weight), activation_key=activation_key)


def build(weights: Any) -> Any:
    """Build the layer through the public API, with one workspace for all calls.

    Args:
        weights: the benchmark's weights.
    """
    import moe_core as mc
    import torch

    shape, scheme = weights.shape, weights.scheme
    oracle, selection = select(shape, scheme)
    given = {"w13": weights.w13, "w2": weights.w2, "w13_scale": weights.s13, "w2_scale": weights.s2}
    if scheme == "int4_g128":
        given |= {"w13": weights.w13.view(torch.uint8), "w2": weights.w2.view(torch.uint8)}
    if weights.b13 is not None:
        given |= {"w13_bias": weights.b13, "w2_bias": weights.b2}
    if shape.act == "swigluoai":
        from moe_mxfp4.layout import deinterleave

        given |= {name: deinterleave(given[name]) for name in ("w13", "w13_scale", "w13_bias")}
    kernel = oracle.make_kernel(selection, oracle.convert(selection, **given))
    kernel.workspace = mc.Workspace(weights.w13.device)
    kernel.workspace.take(kernel.workspaces(16384))

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return kernel.apply(x, topk_weights=w, topk_ids=ids)

    return run, {"backend": selection.backend, "experts": selection.experts.__name__}


def register(peers: list[Any]) -> None:
    for scheme, name in NAMES.items():
        peers.append(Peer(name, (scheme,), build))  # noqa: F821  (the benchmark predefines Peer)
