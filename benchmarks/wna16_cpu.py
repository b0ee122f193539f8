"""INT4 and INT8 weights on a CPU: the torch experts compared with full dequantization.

    python benchmarks/wna16_cpu.py [--tokens 1 8 64] [--rounds 5] [--threads 1] [--json FILE]

The layer is Qwen3-30B-A3B's (128 experts, top 8, hidden 2048, intermediate 768), bfloat16. Rounds of three variants
alternate: the selected one (torch's CPU product of 4-bit weights if available), blocks of dequantized rows, and whole
dequantized matrices. The output has the medians of wall time in milliseconds, and the median of the rounds' ratios to
the last variant. The exit code is 1 if results differ by more than bfloat16 rounding explains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from moe_core import (
    FusedMoEConfig,
    FusedMoEKernel,
    MoEWeights,
    QuantKey,
    kInt4Static,
    kInt4StaticAsym,
    kInt8Static,
)
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.reference.torch_experts import TorchExperts
from moe_core.spec.roles import scale_shape
from moe_wna16.experts.torch import TorchWNA16Experts
from torch import Tensor

LAYER = FusedMoEConfig(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768)
KEYS = {
    "int4": kInt4Static,
    "int4, zero points, float16 scales": kInt4StaticAsym.with_scale_dtype(torch.float16),
    "int4, activation order": replace(kInt4Static, permuted=True),
    "int8": kInt8Static,
}


class Blocks(TorchWNA16Experts):
    """The torch experts without torch's product of 4-bit weights."""

    def _packed_groups(self) -> None:
        return None


class Dequantizing(TorchExperts):
    """Converts each expert's weights to float32, then multiplies."""

    claims = TorchWNA16Experts.claims


def weights(key: QuantKey) -> MoEWeights:
    """Generate random codes, with scales that keep values in a typical range."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    per_byte = 1 if key.packing is None else 2
    for name, rows, cols, parts in (
        ("w13", LAYER.w13_rows, LAYER.hidden_size, 2),
        ("w2", LAYER.hidden_size, LAYER.intermediate_size, 1),
    ):
        shape = (LAYER.num_experts, rows, cols)
        tensors[name] = torch.randint(256, (*shape[:2], cols // per_byte), generator=generator, dtype=torch.uint8)
        scales = scale_shape(key, *shape, parts)
        scale = torch.rand(scales, generator=generator) + 0.5
        tensors[f"{name}_scale"] = (scale / (2 ** (key.dtype.bits - 1) * cols**0.5)).to(key.scale.dtype)
        if not key.symmetric:
            middle = 2 ** (key.dtype.bits - 1)
            zero_point = torch.randint(middle - 2, middle + 3, scales, generator=generator, dtype=torch.int32)
            tensors[f"{name}_zero_point"] = zero_point
        if key.permuted:
            order = torch.rand(shape[0], cols, generator=generator).argsort(dim=1)
            tensors[f"{name}_g_idx"] = (order // key.group_size).to(torch.int32)
    return MoEWeights(weight_key=key, activation_key=None, **tensors)


def main() -> int:
    """Run the command line; prints a line per type of weights and token count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(1)
    report, wrong = [], 0
    for name, key in KEYS.items():
        canonical = weights(key)
        kernels = []
        for experts in (TorchWNA16Experts, Blocks, Dequantizing):
            made = experts(LAYER, weight_key=key, activation_key=None)
            kernels.append(FusedMoEKernel(made, made.convert(canonical), default_prepare_finalize(LAYER)))
        for tokens in options.tokens:
            x = torch.randn(tokens, LAYER.hidden_size, generator=generator).bfloat16()
            router, ids = torch.rand(tokens, LAYER.num_experts, generator=generator).topk(LAYER.top_k)
            results = [kernel.apply(x, topk_weights=router, topk_ids=ids).double() for kernel in kernels]
            wrong += any(float((r - results[2]).norm() / results[2].norm()) > 2.0**-7 for r in results[:2])
            wall: list[list[float]] = [[] for _ in kernels]
            for _ in range(options.rounds):
                for times, kernel in zip(wall, kernels, strict=True):
                    start = time.perf_counter()
                    kernel.apply(x, topk_weights=router, topk_ids=ids)
                    times.append(1e3 * (time.perf_counter() - start))
            ratios = [statistics.median(b / a for a, b in zip(times, wall[2], strict=True)) for times in wall[:2]]
            found = [statistics.median(times) for times in wall]
            report += [
                {"shape": name, "scheme": "cpu", "peer": peer, "M": tokens, "ms": wall_ms}
                for peer, wall_ms in zip(("torch", "blocks", "whole"), found, strict=True)
            ]
            print(
                f"{name}, {tokens} tokens: {found[0]:.1f} ms ({ratios[0]:.1f} x), blocks {found[1]:.1f} "
                f"({ratios[1]:.1f} x), whole {found[2]:.1f}",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
