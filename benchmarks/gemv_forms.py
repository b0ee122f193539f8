"""Layers with few tokens: tiles compared with GEMV variants, on an sm_90 GPU.

    python benchmarks/gemv_forms.py                       # microseconds of a layer, one line per token count
    python benchmarks/gemv_forms.py --only qwen3 --tokens 1,2 --pairs

4-bit layers also have GEMV variants that use `mma.sync`. "16x6" is a variant for both GEMMs with 16 rows per program
and warps that prefetch 6 steps ahead; ``--pairs`` times every combination, such as "16x6+32x3". `err` is the largest
relative difference from the current GEMV over all variants except tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from typing import Any

import moe_core as mc
import torch
from four_bit_plans import DEVICE, compared, draw, layer
from moe_core.kernels.gemm.heuristics import gemv_plan
from moe_core.kernels.gemm.plan import GemvConfig, GemvPlan
from moe_core.kernels.launch.compile_ahead import compile_ahead
from moe_core.kernels.launch.launch import record
from moe_core.testing.meta_layers import call_on_meta
from moe_kit.planned import with_gemv

#: scheme, name, experts, experts per token, hidden size, intermediate size
LAYERS = [
    ("mxfp4", "gpt-oss-20b", 32, 4, 2880, 2880),
    ("mxfp4", "gpt-oss-120b", 128, 4, 2880, 2880),
    ("mxfp4", "qwen3-30b-a3b", 128, 8, 2048, 768),
    ("int4", "qwen3-30b-a3b", 128, 8, 2048, 768),
    ("int4", "dsv3-tp8", 256, 8, 7168, 256),
    ("int4", "dsv3-ep8", 32, 8, 7168, 2048),
    ("int4", "phi-3.5-moe", 16, 2, 4096, 6400),
    ("int4", "mixtral-8x7b", 8, 2, 4096, 14336),
    *(
        (scheme, *sizes)
        for scheme in ("fp8_block", "fp8_channel", "int8_channel")
        for sizes in (
            ("qwen3-30b-a3b", 128, 8, 2048, 768),
            ("dsv3-tp8", 256, 8, 7168, 256),
            ("glm-4.5-air", 128, 8, 4096, 1408),
            ("qwen3-235b-tp2", 128, 8, 4096, 768),
            ("llama-4-scout-tp2", 16, 1, 5120, 4096),
            ("phi-3.5-moe", 16, 2, 4096, 6400),
            ("dsv3-ep8", 32, 8, 7168, 2048),
            ("mixtral-8x7b", 8, 2, 4096, 14336),
        )
    ),
]
#: schemes of 8-bit weights: oracle, weight key, activation key
KEYS = {
    "fp8_block": ("fp8", mc.kFp8Static128BlockSym, mc.kFp8Dynamic128Sym),
    "fp8_channel": ("fp8", mc.kFp8StaticChannelSym, mc.kFp8DynamicTokenSym),
    "int8_channel": ("int8", mc.kInt8StaticChannelSym, mc.kInt8DynamicTokenSym),
}
#: rows per program, and steps that its warps prefetch
FORMS = [(16, 2), (16, 3), (16, 6), (32, 2), (32, 3), (32, 4), (32, 6), (64, 4), (64, 6)]
TOKENS = (1, 2, 3, 4, 6, 8)


def layer_of_8_bits(scheme: str, experts: int, top_k: int, hidden: int, inner: int) -> tuple[Any, Any, Any, Any]:
    """Return (config, experts class, keys, converted random weights)."""
    name, *keys = KEYS[scheme]
    config = mc.FusedMoEConfig(num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=inner)
    oracle = mc.oracle(name)
    selection = oracle.select(config, weight_key=keys[0], activation_key=keys[1])
    given = {}
    for matrix, rows, columns in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        codes = torch.randint(-64, 64, (experts, rows, columns), dtype=torch.int8, device=DEVICE)
        given[matrix] = codes if name == "int8" else codes.view(torch.float8_e4m3fn)
        sizes = (-(-rows // 128), -(-columns // 128)) if scheme == "fp8_block" else (rows, 1)
        given[f"{matrix}_scale"] = (torch.rand(experts, *sizes, device=DEVICE) + 0.5) / 1000
    return config, selection.experts, keys, oracle.convert(selection, **given)


def plans(today: GemvPlan, pairs: bool) -> Iterator[tuple[str, GemvPlan | None]]:
    """Yield the variants to compare: current GEMV, tiles, and GEMV with `mma.sync`."""
    yield "gemv", today
    yield "tiles", None
    found = {}
    for rows, depth in FORMS:
        # four warps share the words of a step, 16 for each of 64 / rows parts
        found[f"{rows}x{depth}"] = GemvConfig(rows, depth * 16 * (64 // rows), 4, mma_sync=True)
    for (name, one), (other, two) in product(found.items(), repeat=2):
        if name == other:
            yield name, GemvPlan(one, two, pdl=True)
        elif pairs:
            yield f"{name}+{other}", GemvPlan(one, two, pdl=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="layers with this in their scheme or name")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers of tokens")
    parser.add_argument("--pairs", action="store_true", help="every form of gemm1 with every form of gemm2")
    arguments = parser.parse_args()
    numbers = [int(word) for word in arguments.tokens.split(",")]
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), flush=True)
    for scheme, name, *sizes in LAYERS:
        if arguments.only not in f"{scheme} {name}":
            continue
        experts, top_k, hidden, inner = sizes
        if scheme in KEYS:
            config, made, keys, weights = layer_of_8_bits(scheme, experts, top_k, hidden, inner)
        else:
            config, made, key, weights = layer(scheme, experts, top_k, hidden, inner)
            keys = [key, None]

        def planned(plan: GemvPlan | None, made: Any = made, config: Any = config, keys: Any = keys) -> Any:
            return with_gemv(made, plan)(config, weight_key=keys[0], activation_key=keys[1])

        today = gemv_plan(planned(None).problem, 1)
        if today is None:
            print(f"{scheme} {name} has no products with vectors", flush=True)
            continue
        forms = dict(plans(today, arguments.pairs)) if scheme not in KEYS else {"gemv": today, "tiles": None}
        with record() as launches:
            for tokens, plan in product(numbers, forms.values()):
                call_on_meta(planned(plan), tokens)
        compile_ahead(launches)
        for tokens in numbers:
            inputs = [draw(experts, top_k, hidden, tokens) for _ in range(24)]
            times, found = compared([planned(plan) for plan in forms.values()], weights, inputs)
            errors = dict(zip(forms, found, strict=True))
            by_form = " ".join(f"{form} {time:.1f}" for form, time in zip(forms, times, strict=True))
            error = max(value for form, value in errors.items() if form != "tiles")
            print(f"{scheme} {name} M {tokens} | {by_form} | err {error:.1e} tiles {errors['tiles']:.1e}", flush=True)
        del weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
