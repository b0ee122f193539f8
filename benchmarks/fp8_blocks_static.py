"""Plugin of the fused-MoE benchmark: static FP8 scales, other FP8 blocks, next to vLLM.

python bench.py --plugin benchmarks/fp8_blocks_static.py --only '/fp8_(tensor|block)/.*_(static|64x64|64x128|128x64)$'

Blocks differ from 128x128; the peer is vLLM's Triton path. Weights are those of `fp8_tensor` and `fp8_block`. A smaller
block repeats the scale of its 128x128 block, so that the matrices and the benchmark's reference stay the same.
"""

from __future__ import annotations

import functools
from typing import Any

ACTIVATIONS = {"silu": "silu", "relu2": "relu2_no_mul"}
BLOCKS = ((64, 64), (64, 128), (128, 64))
# largest value of x and of h that a static scale covers: x is standard normal, h is silu(g) * u or relu(g)^2 of such
# values
LARGEST = (6.0, 20.0)
FP8_MAX = 448.0


def _static_scales(experts: int) -> tuple[Any, Any]:
    import torch

    x, h = (torch.full((experts,), largest / FP8_MAX, device="cuda") for largest in LARGEST)
    return x, h


def _finer(scales: Any, block: tuple[int, int]) -> Any:
    """Repeat block scales [E, n/128, k/128] for smaller blocks: [E, n/block[0], k/block[1]]."""
    for axis, size in enumerate(block, start=1):
        scales = scales.repeat_interleave(128 // size, dim=axis)
    return scales.contiguous()


def _ours(weights: Any, keys: tuple[Any, Any], **scales: Any) -> Any:
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
    oracle = mc.oracle("fp8")
    selection = oracle.select(config, weight_key=keys[0], activation_key=keys[1])
    kernel = oracle.make_kernel(selection, oracle.convert(selection, w13=weights.w13, w2=weights.w2, **scales))
    kernel.workspace = mc.Workspace("cuda")
    kernel.workspace.take(kernel.workspaces(16384))

    def run(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return kernel.apply(x, topk_weights=w, topk_ids=ids)

    return run, {"backend": selection.backend}


def static(weights: Any) -> Any:
    import moe_core as mc

    parts = 2 if weights.shape.gated else 1
    x, h = _static_scales(weights.shape.E)
    return _ours(
        weights,
        (mc.kFp8StaticTensorSym, mc.kFp8StaticTensorSym),
        w13_scale=weights.s13.view(-1, 1).expand(-1, parts).contiguous(),
        w2_scale=weights.s2.view(-1, 1),
        w13_input_scale=x,
        w2_input_scale=h,
    )


def blocks(weights: Any, block: tuple[int, int]) -> Any:
    import moe_core as mc

    activation = mc.kFp8Dynamic64Sym if block[1] == 64 else mc.kFp8Dynamic128Sym
    scales = {"w13_scale": _finer(weights.s13, block), "w2_scale": _finer(weights.s2, block)}
    return _ours(weights, (mc.kFp8Static128BlockSym.with_group(*block), activation), **scales)


def _vllm(weights: Any, s13: Any, s2: Any, a13: Any, a2: Any, block: tuple[int, int] | None) -> Any:
    from types import SimpleNamespace

    from vllm_peers import modular_kernel, modules, triton_info

    modules()
    from vllm.model_executor.layers.fused_moe.oracle import fp8

    kind = fp8.Fp8MoeBackend.TRITON
    layer = SimpleNamespace()
    if block:
        layer.weight_block_size = list(block)
    w13, w2, s13, s2 = fp8.convert_to_fp8_moe_kernel_format(kind, layer, weights.w13, weights.w2, s13, s2, a13, a2)
    quant = fp8.make_fp8_moe_quant_config(kind, s13, s2, a13, a2, block_shape=list(block) if block else None)
    experts = fp8.backend_to_kernel_cls(kind)[0]
    return modular_kernel(weights.shape, experts, quant, w13, w2), triton_info(weights.shape, "fp8_w8a8", block)


def vllm_static(weights: Any) -> Any:
    """vLLM with static scales; it uses the experts' largest activation scale, here all equal."""
    x, h = _static_scales(1)
    return _vllm(weights, weights.s13, weights.s2, x, h, None)


def vllm_blocks(weights: Any, block: tuple[int, int]) -> Any:
    return _vllm(weights, _finer(weights.s13, block), _finer(weights.s2, block), None, None, block)


def register(peers: list[Any]) -> None:
    peer = Peer  # noqa: F821  (the benchmark predefines Peer)
    peers.append(peer("moe_fp8_static", ("fp8_tensor",), static, lambda shape: shape.act in ACTIVATIONS))
    peers.append(peer("vllm_triton_static", ("fp8_tensor",), vllm_static))
    for block in BLOCKS:
        name = "x".join(map(str, block))
        peers.append(peer(f"moe_fp8_{name}", ("fp8_block",), functools.partial(blocks, block=block)))
        peers.append(peer(f"vllm_triton_{name}", ("fp8_block",), functools.partial(vllm_blocks, block=block)))
