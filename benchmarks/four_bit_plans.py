"""Launch configurations of 4-bit layers compared with the heuristics' choice, on sm_90.

    python benchmarks/four_bit_plans.py                   # relative times, one line per layer and token count
    python benchmarks/four_bit_plans.py --only mxfp4 --tokens 128,512

"tiles16" and "tiles32" are tile-kernel configurations, "special64" and "special128" warp-specialized ones. "A + chosen"
uses A for gemm1 and the heuristics' choice for gemm2, "chosen + A" the reverse. All read the same weights, and results
are compared with those of the heuristics' choice: `err` is the largest relative difference. At the GPU's power limit,
the first of several equal plans may appear slower.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import moe_core as mc
import torch
from moe_core.kernels.gemm.plan import TileConfig, TilePlan
from moe_core.kernels.launch import replay
from moe_core.kernels.launch.compile_ahead import compile_ahead
from moe_core.kernels.launch.launch import record
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.runtime.kernel import FusedMoEKernel
from moe_core.testing.meta_layers import call_on_meta
from moe_kit.planned import with_plan

#: scheme, name, experts, experts per token, hidden size, intermediate size, token counts
LAYERS = [
    ("int4", "dsv3-tp8", 256, 8, 7168, 256, (128, 256, 512, 768, 1024, 1536, 2048)),
    ("int4", "kimi-k2-tp8", 384, 8, 7168, 256, (512, 1024, 2048)),
    ("int4", "qwen3-30b-a3b", 128, 8, 2048, 768, (64, 128, 256, 384, 512, 640, 768, 1024)),
    ("int4", "glm-4.5-air", 128, 8, 4096, 1408, (128, 256, 512, 768)),
    ("int4", "mixtral-8x7b", 8, 2, 4096, 14336, (32, 48, 64, 96, 128, 192, 256)),
    ("int4", "phi-3.5-moe", 16, 2, 4096, 6400, (64, 128, 256, 384)),
    ("int4", "llama-4-scout-tp2", 16, 1, 5120, 4096, (256, 512)),
    ("mxfp4", "gpt-oss-120b", 128, 4, 2880, 2880, (128, 256, 512, 768, 1024, 1536)),
    ("mxfp4", "gpt-oss-20b", 32, 4, 2880, 2880, (64, 128, 192, 256, 384, 512)),
]
DEVICE = torch.device("cuda")
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def layer(scheme: str, experts: int, top_k: int, hidden: int, inner: int) -> tuple[Any, Any, Any, Any]:
    """Return (config, experts class, weight key, converted random weights)."""
    gpt_oss = scheme == "mxfp4"
    config = mc.FusedMoEConfig(
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        intermediate_size=inner,
        activation=mc.MoEActivation("swigluoai" if gpt_oss else "silu"),
        activation_params=mc.ActivationParams(alpha=1.702, beta=1.0, limit=7.0) if gpt_oss else None,
        has_bias=gpt_oss,
    )
    key = mc.kMxfp4Static if gpt_oss else mc.kInt4Static
    oracle = mc.oracle("mxfp4" if gpt_oss else "wna16")
    selection = oracle.select(config, weight_key=key, activation_key=None)
    given = {}
    for name, rows, columns in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        given[name] = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=DEVICE)
        if gpt_oss:
            scale = torch.randint(118, 123, (experts, rows, columns // 32), dtype=torch.uint8, device=DEVICE)
            given[f"{name}_bias"] = torch.randn(experts, rows, device=DEVICE, dtype=torch.bfloat16)
        else:
            scale = ((torch.rand(experts, rows, columns // 128, device=DEVICE) + 0.5) / 200).bfloat16()
        given[f"{name}_scale"] = scale
    return config, selection.experts, key, oracle.convert(selection, **given)


def other_plans(chosen: TilePlan, rows_per_expert: float) -> dict[str, TilePlan]:
    """Return the plans to compare with the heuristics' choice."""
    plans = {}
    for name, rows, special in (
        ("tiles16", 16, False),
        ("tiles32", 32, False),
        ("special64", 64, True),
        ("special128", 128, True),
    ):
        if not rows / 16 <= rows_per_expert <= rows * 1.5:
            continue  # nearly every expert would have a second tile, or an empty one
        one = TileConfig(rows, 128, 4, 3, 1, swap_ab=True, tma=not special, warp_specialized=special)
        two = replace(one, group_m=8)
        plans[name] = TilePlan(one, two)
        # Rows are sorted into tiles for both GEMMs; only the tile kernel can split them.
        if chosen.gemm2.block_m <= rows or not chosen.gemm2.warp_specialized:
            plans[f"{name} + chosen"] = TilePlan(one, chosen.gemm2)
        if chosen.gemm1.block_m <= rows or not chosen.gemm1.warp_specialized:
            plans[f"chosen + {name}"] = TilePlan(chosen.gemm1, two)
    return plans


def compile_all(config: Any, made: Any, key: Any, tokens: list[int]) -> None:
    """Compile the kernels of a layer's plans on all cores: in sequence it takes minutes."""
    chosen = made(config, weight_key=key, activation_key=None)
    with record() as launches:
        for number in tokens:
            plan = chosen.plan(number)
            rows = number * config.top_k / config.num_experts
            for other in (plan, *other_plans(plan, rows).values()):
                call_on_meta(with_plan(made, other)(config, weight_key=key, activation_key=None), number)
    compile_ahead(launches)


def draw(experts: int, top_k: int, hidden: int, tokens: int) -> Inputs:
    """Generate hidden states, router weights and ids with uniform routing."""
    ids = torch.rand(tokens, experts, device=DEVICE).topk(top_k).indices.int()
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
    return x, torch.rand(tokens, top_k, device=DEVICE), ids


def capture(kernel: FusedMoEKernel, inputs: list[Inputs]) -> Callable[[], None]:
    """Capture a CUDA graph with one call per element of ``inputs``."""
    for x, weights, ids in inputs:
        kernel.apply(x, topk_weights=weights, topk_ids=ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, weights, ids in inputs:
            kernel.apply(x, topk_weights=weights, topk_ids=ids)
    return graph.replay


def microseconds(calls: list[Callable[[], None]], number: int) -> list[float]:
    """Return median microseconds per layer of interleaved calls with ``number`` layers each."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(8):
        for times, call in zip(found, calls, strict=True):
            start.record()
            for _ in range(4):
                call()
            end.record()
            torch.cuda.synchronize()
            if turn:
                times.append(start.elapsed_time(end) * 1000 / 4 / number)
    return [statistics.median(times) for times in found]


def compared(layers: list[Any], weights: Any, inputs: list[Inputs]) -> tuple[list[float], list[float]]:
    """Time several layers with the same weights, and compare their results with the first one's.

    Returns microseconds and relative differences.
    """
    x, router, ids = inputs[0]
    calls, kernels, outputs = [], [], []
    for experts in layers:
        replay._SHARED.clear()  # equal layers would share launches, even if their classes plan differently
        kernel = FusedMoEKernel(experts, weights, default_prepare_finalize(experts.config))
        kernel.workspace = mc.Workspace(DEVICE)
        kernel.workspace.take(kernel.workspaces(x.shape[0]))
        kernels.append(kernel)  # keep alive: a graph writes to its workspace
        torch.cuda.synchronize()
        outputs.append(kernel.apply(x, topk_weights=router, topk_ids=ids).float())
        calls.append(capture(kernel, inputs))
    first = outputs[0]
    errors = [float((y - first).norm() / first.norm()) for y in outputs]
    return microseconds(calls, len(inputs)), errors


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="layers with this in their scheme or name")
    parser.add_argument("--tokens", default="", help="numbers of tokens instead of the layers' own")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for scheme, name, *sizes, counts in LAYERS:
        if arguments.only not in f"{scheme} {name}":
            continue
        experts, top_k, hidden, inner = sizes
        config, made, key, weights = layer(scheme, experts, top_k, hidden, inner)
        numbers = [int(word) for word in arguments.tokens.split(",") if word] or list(counts)
        compile_all(config, made, key, numbers)
        for tokens in numbers:
            rows = tokens * top_k / experts
            chosen = made(config, weight_key=key, activation_key=None).plan(tokens)
            inputs = [draw(experts, top_k, hidden, tokens) for _ in range(8 if tokens <= 512 else 4)]
            plans = chosen, *other_plans(chosen, rows).values()
            layers = [with_plan(made, plan)(config, weight_key=key, activation_key=None) for plan in plans]
            times, errors = compared(layers, weights, inputs)
            error = max(errors)
            kind = "special" if chosen.gemm1.warp_specialized else "tiles"
            tiles = f"{kind} {chosen.gemm1.block_m}/{chosen.gemm2.block_m}"
            text = f"{name} M {tokens} ({rows:.1f} rows) {tiles} {times[0]:.1f} us"
            others = zip(other_plans(chosen, rows), times[1:], strict=True)
            print(text, *(f"| {plan} {time / times[0]:.3f}" for plan, time in others), f"| err {error:.1e}", flush=True)
        del weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
