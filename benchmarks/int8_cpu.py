"""INT8 on a CPU: exact integer products compared with dequantization to float32.

    python benchmarks/int8_cpu.py [--tokens 64] [--rounds 7] [--threads 2] [--json FILE]

The layer is Qwen3-30B-A3B's (128 experts, top 8, hidden 2048, intermediate 768). Rounds of both alternate. The output
has the medians of CPU time over all threads and of wall time, and the median of the rounds' ratios. The exit code is 1
if the results differ by more than float32 rounding explains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from moe_core import (
    FusedMoEConfig,
    FusedMoEKernel,
    FusedMoEQuantDesc,
    MoEWeights,
    QuantKey,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
)
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.reference.quantization import dequantize_weight
from moe_core.reference.torch_experts import TorchExperts
from moe_core.spec.roles import scale_shape
from moe_int8.experts.torch import TorchInt8Experts
from torch import Tensor
from torch.nn import functional as F

LAYER = FusedMoEConfig(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768)
KEYS = {"W8A8 per channel": kInt8StaticChannelSym, "W4A8, groups of 128": kInt4W4A8StaticGroup128Sym}


class Dequantizing(TorchExperts):
    """Converts each expert's weights to float32, then multiplies the dequantized activations."""

    claims = TorchInt8Experts.claims

    def product(self, x: Tensor, weights: Tensor, desc: FusedMoEQuantDesc, expert: int, parts: int = 1) -> Tensor:
        if desc.key is None or desc.scale is None:
            raise ValueError("the weights are quantized here")
        one = slice(expert, expert + 1)
        return F.linear(x, dequantize_weight(weights[one], desc.scale[one], desc.key, parts=parts)[0])


def weights(key: QuantKey) -> MoEWeights:
    """Generate random codes, with scales that keep values in a typical range."""
    generator = torch.Generator().manual_seed(0)
    low, high = int(key.dtype.min_value), int(key.dtype.max_value)
    tensors: dict[str, Tensor] = {}
    for name, rows, cols, parts in (
        ("w13", LAYER.w13_rows, LAYER.hidden_size, 2),
        ("w2", LAYER.hidden_size, LAYER.intermediate_size, 1),
    ):
        shape = (LAYER.num_experts, rows, cols)
        tensors[name] = torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8)
        scale = torch.rand(scale_shape(key, *shape, parts), generator=generator) + 0.5
        tensors[f"{name}_scale"] = (scale / (high * cols**0.5)).to(key.scale.dtype)
    return MoEWeights(weight_key=key, activation_key=kInt8DynamicTokenSym, **tensors)


def main() -> int:
    """Run the command line; prints a line per type of weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(options.tokens, LAYER.hidden_size, generator=generator).bfloat16()
    router, ids = torch.rand(options.tokens, LAYER.num_experts, generator=generator).topk(LAYER.top_k)
    report, wrong = [], 0
    for name, key in KEYS.items():
        canonical = weights(key)
        kernels = []
        for experts in (TorchInt8Experts, Dequantizing):
            made = experts(LAYER, weight_key=key, activation_key=kInt8DynamicTokenSym)
            kernels.append(FusedMoEKernel(made, made.convert(canonical), default_prepare_finalize(LAYER)))
        results = [kernel.apply(x, topk_weights=router, topk_ids=ids).double() for kernel in kernels]
        wrong += float((results[0] - results[1]).norm() / results[1].norm()) > 2.0**-7
        processor: list[list[float]] = [[], []]
        wall: list[list[float]] = [[], []]
        for _ in range(options.rounds):
            for which, kernel in enumerate(kernels):
                start = time.process_time(), time.perf_counter()
                kernel.apply(x, topk_weights=router, topk_ids=ids)
                processor[which].append(1e3 * (time.process_time() - start[0]))
                wall[which].append(1e3 * (time.perf_counter() - start[1]))
        ratio = statistics.median(b / a for a, b in zip(*processor, strict=True))
        found = [statistics.median(times) for times in (*processor, *wall)]
        report += [
            {
                "shape": f"{name}, {options.threads} threads",
                "scheme": "cpu",
                "peer": peer,
                "M": options.tokens,
                "ms": ms,
            }
            for peer, ms in zip(("torch", "dequantized"), found[2:], strict=True)
        ]
        print(
            f"{name}, {options.tokens} tokens: {found[0]:.0f} ms of processor time against {found[1]:.0f} "
            f"({ratio:.2f} x), wall {found[2]:.0f} against {found[3]:.0f} ms"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
