"""Few tokens of 4-bit layers by tiles, by products with vectors, and by those of `mma.sync`, on an sm_90 GPU.

    python benchmarks/gemv_forms.py                       # microseconds of a layer, one line for each number of tokens
    python benchmarks/gemv_forms.py --only qwen3 --tokens 1,2 --pairs

"16x6" are programs of 16 rows, whose warps request 6 steps ahead, in both products; with ``--pairs`` every combination,
"16x6+32x3", is timed.  `err` is the largest difference from today's vectors, relative, over all forms but the tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from typing import Any

import moe_core as mc
import torch
from four_bit_plans import DEVICE, capture, draw, layer, microseconds
from moe_core import replay
from moe_core.gemm.heuristics import gemv_plan
from moe_core.gemm.heuristics.gemv import GemvConfig, GemvPlan
from moe_core.jit.compile_ahead import compile_ahead
from moe_core.jit.launch import record
from moe_core.kernel import FusedMoEKernel
from moe_core.prepare_finalize.by_name import default_prepare_finalize
from moe_core.testing.compile_cases import call_on_meta
from moe_core.testing.planned import with_gemv

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
]
#: rows of a program, and steps that its warps request ahead
FORMS = [(16, 2), (16, 3), (16, 6), (32, 2), (32, 3), (32, 4), (32, 6), (64, 4), (64, 6)]
TOKENS = (1, 2, 3, 4, 6, 8)


def plans(today: GemvPlan, pairs: bool) -> Iterator[tuple[str, GemvPlan | None]]:
    """What is compared: today's vectors, tiles, and vectors by `mma.sync`."""
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
    """The command line."""
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
        config, made, key, weights = layer(scheme, experts, top_k, hidden, inner)

        def planned(plan: GemvPlan | None, made: Any = made, config: Any = config, key: Any = key) -> Any:
            return with_gemv(made, plan)(config, weight_key=key, activation_key=None)

        today = gemv_plan(planned(None).problem, 1)
        if today is None:
            raise SystemExit(f"{name} has no products with vectors")
        forms = dict(plans(today, arguments.pairs))
        with record() as launches:
            for tokens, plan in product(numbers, forms.values()):
                call_on_meta(planned(plan), tokens)
        compile_ahead(launches)
        for tokens in numbers:
            inputs = [draw(experts, top_k, hidden, tokens) for _ in range(24)]
            x, router, ids = inputs[0]
            calls, kernels, errors, reference = [], [], {}, None
            for form, plan in forms.items():
                replay._SHARED.clear()  # layers that are alike share launches, whatever their class plans
                kernel = FusedMoEKernel(planned(plan), weights, default_prepare_finalize(config))
                kernel.workspace = mc.Workspace(DEVICE)
                kernel.workspace.take(kernel.workspaces(tokens))
                kernels.append(kernel)  # a graph writes to its workspace
                torch.cuda.synchronize()
                y = kernel.apply(x, topk_weights=router, topk_ids=ids).float()
                reference = y if reference is None else reference
                errors[form] = float((y - reference).norm() / reference.norm())
                calls.append(capture(kernel, inputs))
            times = microseconds(calls, len(inputs))
            by_form = " ".join(f"{form} {time:.1f}" for form, time in zip(forms, times, strict=True))
            error = max(value for form, value in errors.items() if form != "tiles")
            print(f"{scheme} {name} M {tokens} | {by_form} | err {error:.1e} tiles {errors['tiles']:.1e}", flush=True)
        del weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
