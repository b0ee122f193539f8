"""Small launches of every kind of kernel, by group, for compute-sanitizer; `run.sh` beside it runs them.

- ``python launches.py GROUP,... FOLDER``: results are kept in FOLDER, or compared bit for bit with those kept there
- ``python launches.py GROUP,... - --dry``: without a GPU, which kernels the layers of the groups launch

The exit status is 1 where a call fails, launches other kernels than it is there for, or gives other bits.
"""

from __future__ import annotations

import collections
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from moe_core import (
    FusedMoEConfig,
    FusedMoEKernel,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kInt4Static,
    kInt4Static32Asym,
    kInt8DynamicTokenSym,
    kInt8Static,
    kInt8StaticChannelSym,
    kMxfp4Static,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from moe_core.kernels.gemm.plan import TileConfig, TilePlan
from moe_core.kernels.launch.launch import observe, record
from moe_core.testing.loading import load_experts

BF16, FP16 = torch.bfloat16, torch.float16
DRY = "--dry" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def swapped(rows, split=1, tma=True, warps=4, block_n=128, **more):
    return TileConfig(rows, block_n, warps, 3, 1, swap_ab=True, tma=tma, split_k=split, **more)


def both(config, pdl=False):
    return TilePlan(config, config, pdl)


WIDE = TileConfig(128, 128, 8, 3, 8, warp_specialized=True)
SPECIAL, SHORT = both(WIDE), both(replace(WIDE, short_tiles=True))
WORDS = {rows: both(swapped(rows, tma=False, warp_specialized=True)) for rows in (64, 128)}
PLAIN = both(TileConfig(64, 128, 8, 3, 8, tma=True))
SPLIT, FEW, MANY = both(swapped(16, 2), True), both(swapped(32), True), both(swapped(64, tma=False))

FP8, CHANNEL = "moe_fp8.experts.triton:TritonFp8BlockExperts", "moe_fp8.experts.triton_scaled_mm:TritonFp8Experts"
INT8, W8, W4A8 = (
    f"moe_int8.experts.{name}"
    for name in (
        "triton:TritonInt8Experts",
        "triton_weight_only:TritonInt8WeightOnlyExperts",
        "triton_w4a8:TritonW4A8Int8Experts",
    )
)
MARLIN8, MXFP8 = "moe_fp8.experts.marlin:MarlinFp8Experts", "moe_fp8.experts.triton_mxfp8:TritonMxfp8Experts"
MARLIN4, BATCHED4 = (f"moe_mxfp4.experts.marlin:{name}" for name in ("MarlinMxfp4Experts", "BatchedMarlinMxfp4Experts"))
E2M1, STORED4 = "moe_mxfp4.experts.marlin_fp8:MarlinMxfp4Fp8Experts", "moe_mxfp4.experts.triton:TritonMxfp4Experts"
INT4, BATCHED_INT4 = (
    f"moe_wna16.experts.marlin:{name}" for name in ("MarlinWNA16Experts", "BatchedMarlinWNA16Experts")
)
STORED = "moe_wna16.experts.triton:TritonWNA16Experts"

BLOCK, DYN = kFp8Static128BlockSym, kFp8Dynamic128Sym
ODD = {"hidden_size": 272, "intermediate_size": 208}
EVEN = {"hidden_size": 256, "intermediate_size": 256}
BATCHED = {"activation_format": "batched"}
MAPPED = {"num_experts": 5, "num_local_experts": 3}
ORDER, FACTORS = replace(kInt4Static, permuted=True), replace(kInt4Static, permuted=True, pre_scaled=True)

#: group: name: (experts, plan or None for the heuristics', weight key, activation key, tokens, layer, kernel to see)
LAYERS = {
    "hopper": {
        "block": (FP8, SPECIAL, BLOCK, DYN, 150, EVEN | {"has_bias": True}, "hopper_kernel"),
        "block short": (FP8, SHORT, BLOCK, DYN, 150, ODD | MAPPED, "hopper_kernel"),
        "block batched": (FP8, SPECIAL, BLOCK, DYN, 140, EVEN | BATCHED, "hopper_kernel"),
        "channel": (CHANNEL, SPECIAL, kFp8StaticChannelSym, kFp8DynamicTokenSym, 150, EVEN, "hopper_kernel"),
        "tensor": (CHANNEL, SPECIAL, kFp8StaticTensorSym, kFp8StaticTensorSym, 150, EVEN, "hopper_kernel"),
        "tensor dynamic": (CHANNEL, SPECIAL, kFp8StaticTensorSym, kFp8DynamicTensorSym, 150, EVEN, "hopper_kernel"),
        "int8": (INT8, SPECIAL, kInt8StaticChannelSym, kInt8DynamicTokenSym, 150, EVEN, "hopper_kernel"),
    },
    "words": {
        "int4 64": (INT4, WORDS[64], kInt4Static, None, 120, EVEN | {"dtype": BF16, "has_bias": True}, "words_kernel"),
        "int4 128": (INT4, WORDS[128], kInt4Static, None, 200, EVEN | MAPPED | {"dtype": BF16}, "words_kernel"),
        "int4 zero": (INT4, WORDS[64], kInt4Static32Asym, None, 120, EVEN | {"dtype": FP16}, "words_kernel"),
        "int4 batched": (
            BATCHED_INT4,
            WORDS[64],
            kInt4Static,
            None,
            100,
            EVEN | BATCHED | {"dtype": BF16},
            "words_kernel",
        ),
        "mxfp4": (MARLIN4, WORDS[128], kMxfp4Static, None, 200, EVEN | {"dtype": BF16}, "words_kernel"),
        "mxfp4 batched": (
            BATCHED4,
            WORDS[64],
            kMxfp4Static,
            None,
            100,
            EVEN | BATCHED | {"dtype": BF16},
            "words_kernel",
        ),
    },
    "tiles": {
        "block split": (FP8, SPLIT, BLOCK, DYN, 5, ODD | {"has_bias": True}, "split_k_reduce_kernel"),
        "block swapped": (FP8, FEW, BLOCK, DYN, 20, ODD | MAPPED, "grouped_gemm_kernel"),
        "block plain": (FP8, PLAIN, BLOCK, DYN, 60, ODD, "grouped_gemm_kernel"),
        "channel split": (CHANNEL, SPLIT, kFp8StaticChannelSym, kFp8DynamicTokenSym, 5, ODD, "split_k_reduce_kernel"),
        "int8 static": (INT8, FEW, kInt8StaticChannelSym, kInt8DynamicTokenSym, 20, ODD, "grouped_gemm_kernel"),
        "w4a8 split": (W4A8, both(swapped(16, 2)), "w4a8", kInt8DynamicTokenSym, 5, {}, "split_k_reduce_kernel"),
        "int4 split": (INT4, SPLIT, kInt4Static, None, 5, ODD | {"dtype": BF16}, "split_k_reduce_kernel"),
        "int4 odd": (
            INT4,
            MANY,
            kInt4Static,
            None,
            70,
            {"hidden_size": 203, "intermediate_size": 77},
            "grouped_gemm_kernel",
        ),
        "int4 order": (INT4, SPLIT, ORDER, None, 5, ODD, "grouped_gemm_kernel"),
        "int4 factors": (INT4, FEW, FACTORS, None, 20, ODD, "grouped_gemm_kernel"),
        "int8 words": (W8, both(swapped(128, warps=8)), kInt8StaticChannelSym, None, 130, ODD, "grouped_gemm_kernel"),
        "e4m3 words": (MARLIN8, SPLIT, kFp8StaticChannelSym, None, 5, ODD, "split_k_reduce_kernel"),
        "mxfp8": (MXFP8, FEW, kMxfp8Static, kMxfp8Dynamic, 20, EVEN, "grouped_gemm_kernel"),
        "mxfp4 split": (MARLIN4, SPLIT, kMxfp4Static, None, 5, EVEN, "split_k_reduce_kernel"),
        "mxfp4 e4m3": (E2M1, both(swapped(16, 2)), kMxfp4Static, kFp8DynamicTokenSym, 5, EVEN, "split_k_reduce_kernel"),
        "int4 as stored": (STORED, None, kInt4Static32Asym, None, 20, ODD, "grouped_gemm_kernel"),
        "mxfp4 as stored": (STORED4, None, kMxfp4Static, None, 20, EVEN, "grouped_gemm_kernel"),
        "lora": (
            FP8,
            FEW,
            BLOCK,
            DYN,
            20,
            EVEN | {"is_lora_enabled": True, "max_loras": 2, "max_lora_rank": 12},
            "adapted_pairs_kernel",
        ),
    },
    "gemv": {
        "int4": (INT4, None, kInt4Static, None, 1, {"dtype": BF16}, "gemv_kernel"),
        "int4 zero": (INT4, None, kInt4Static32Asym, None, 1, {"dtype": FP16, "has_bias": True}, "gemv_kernel"),
        "int4 two": (INT4, None, kInt4Static, None, 2, {"num_experts": 64, "dtype": BF16}, "gemv_kernel"),
        "int8 words": (INT4, None, kInt8Static, None, 1, {"dtype": BF16}, "gemv_kernel"),
        "int8 channel": (W8, None, kInt8StaticChannelSym, None, 1, ODD | {"dtype": BF16}, "gemv_kernel"),
        "e4m3": (MARLIN8, None, kFp8StaticChannelSym, None, 1, ODD | {"dtype": BF16}, "gemv_kernel"),
        "mxfp4": (MARLIN4, None, kMxfp4Static, None, 1, {"dtype": BF16, "has_bias": True}, "gemv_mma_kernel"),
        "block": (FP8, None, BLOCK, DYN, 1, EVEN | {"has_bias": True}, "scaled_gemv_kernel"),
        "channel": (CHANNEL, None, kFp8StaticChannelSym, kFp8DynamicTokenSym, 1, EVEN | MAPPED, "scaled_gemv_kernel"),
        "int8": (INT8, None, kInt8StaticChannelSym, kInt8DynamicTokenSym, 1, EVEN, "scaled_gemv_kernel"),
    },
    "ops": {},
}


def key_of(key):
    """W4A8's weight key stands in its claims alone."""
    if key != "w4a8":
        return key
    from moe_core.interface.claims import expand_key

    return next(k for w, _ in load_experts(W4A8).claims.keys for k in expand_key(w))


def run_layer(spec, plan, weight_key, activation_key, tokens, changes):
    """The output of one call; DRY: the names of its launches."""
    from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
    from moe_core.testing.data import make_inputs, make_lora, make_weights
    from moe_kit.planned import with_plan  # found by PYTHONPATH: tests/kit

    experts, weight_key = load_experts(spec), key_of(weight_key)
    made = {"num_experts": 3, "top_k": 2, "hidden_size": 256, "intermediate_size": 128} | changes
    if made.get("activation_format") == "batched":
        made["max_num_tokens"] = tokens
    config = FusedMoEConfig(**made)
    if plan is not None:
        experts = with_plan(experts, plan)
    if DRY:
        from moe_core.spec.device import DeviceInfo
        from moe_core.testing.meta_layers import call_on_meta

        sm90 = DeviceInfo.parse("sm90")
        with record() as launches:
            instance = experts(config, weight_key=weight_key, activation_key=activation_key, device=sm90)
            call_on_meta(instance, tokens)
        return [one.name for one in launches]
    instance = experts(config, weight_key=weight_key, activation_key=activation_key)
    weights = make_weights(config, weight_key, activation_key, seed=1)
    inputs = make_inputs(config, tokens, seed=2)
    lora = make_lora(config, seed=3).to(DEVICE) if config.is_lora_enabled else None
    movement = default_prepare_finalize(config)
    kernel = FusedMoEKernel(instance, instance.convert(weights.to(DEVICE)), movement, lora=lora)
    inputs = inputs.to(DEVICE)
    more = {} if lora is None else {"adapter_ids": inputs.adapter_ids}
    output = kernel.apply(
        inputs.x, topk_weights=inputs.topk_weights, topk_ids=inputs.topk_ids, expert_map=inputs.expert_map, **more
    )
    return [output]


def ops():
    """Name and thunk of calls of the shared operations; small and odd sizes."""
    from functools import partial

    from moe_core import MoEActivation, RoutingConfig
    from moe_core.kernels.ops.align import align_pairs, align_workspaces
    from moe_core.kernels.ops.permute import batch_tokens, gather_rows, scatter_rows
    from moe_core.kernels.ops.quantize import activate_and_quantize, quantize_activation
    from moe_core.kernels.ops.quantize_weights import quantize_weights
    from moe_core.kernels.ops.reduce import reduce_pairs
    from moe_core.kernels.ops.routing import fused_route
    from moe_core.kernels.ops.sort import sort_pairs, sort_workspaces
    from moe_core.testing.interpreter import quicken

    device = DEVICE
    if device == "cpu":
        quicken()
    generator = torch.Generator().manual_seed(5)

    def randn(*shape, dtype=BF16):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def ids(tokens, top_k, experts, dtype=torch.int32):
        return torch.randint(-2, experts + 3, (tokens, top_k), generator=generator).to(dtype).to(device)

    def scratch(specs):
        return {s.name: torch.full(s.shape, -7, device=device).to(s.dtype) for s in specs}

    def sort(which, experts, block_m, expert_map=None):
        work = scratch(sort_workspaces(which.numel(), experts, block_m))
        found = sort_pairs(which, experts, block_m, workspace=work, expert_map=expert_map)
        kept, tiles = int(found.offsets[-1]), int(found.tiles[0])
        return found.offsets, found.pairs[:kept], found.tiles[2 : 2 + 2 * tiles]

    def align(which, experts):
        work = scratch(align_workspaces(which.numel(), experts, 64))
        align_pairs(which, experts, 64, workspace=work)
        return (work["align_count"],)

    places = torch.full((20,), -1, dtype=torch.int32)
    places[[2, 3, 11, 17, 19]] = torch.tensor([4, 0, 1, 3, 2], dtype=torch.int32)
    places = places.to(device)
    large = (4000, 8) if device == "cuda" else (40, 8)
    yield "sort tiny", partial(sort, ids(1, 2, 7), 7, 16)
    yield "sort", partial(sort, ids(257, 3, 130), 130, 64)
    yield "sort map", partial(sort, ids(90, 2, 20, torch.int64), 5, 16, places)
    yield "sort chunked", partial(sort, ids(*large, 512), 512, 128)
    yield "align", partial(align, ids(65, 2, 16), 16)
    keys = [kFp8DynamicTokenSym, kFp8Dynamic128Sym, kFp8DynamicTensorSym, kMxfp8Dynamic, kInt8DynamicTokenSym]
    for key in keys:
        yield f"quantize {key}"[:40], partial(quantize_activation, randn(37, 416), key, backend="triton")
    x, counts = randn(3, 40, 2 * 192), torch.tensor([40, 0, 17], dtype=torch.int32).to(device)

    def activated(key):
        found = activate_and_quantize(MoEActivation.SILU, x, key, row_counts=counts, backend="triton")
        return [t[0].clone() for t in found]  # rows beyond the counts are not written

    yield "activate 128", partial(activated, kFp8Dynamic128Sym)
    yield "activate token", partial(activated, kFp8DynamicTokenSym)
    for key in (
        kFp8Static128BlockSym,
        kFp8StaticChannelSym,
        kFp8StaticTensorSym,
        kMxfp8Static,
        kMxfp4Static,
        kInt8StaticChannelSym,
    ):
        yield f"weights {key}"[:40], partial(quantize_weights, randn(2, 278, 192), key, parts=2, backend="triton")
    logits = randn(33, 128, dtype=torch.float32)
    yield "route", partial(fused_route, logits, top_k=8, config=RoutingConfig(), backend="triton")
    index = torch.randperm(60, generator=generator).int().to(device)
    yield "gather", partial(gather_rows, randn(30, 203), index, per_row=2, backend="triton")
    yield "scatter", partial(scatter_rows, randn(60, 203), index, num_rows=60, backend="triton")
    some = ids(33, 3, 6)
    yield "reduce", lambda: (reduce_pairs(randn(99, 203), some, 6, randn(33, 203)),)

    tokens = randn(33, 208)

    def batched():
        # places that no token uses are not written
        found = batch_tokens(tokens, some, num_experts=6, max_tokens=33, backend="triton")
        return [v for v in found if isinstance(v, torch.Tensor) and v.dtype == torch.int32]

    yield "batch tokens", batched


def run_group(group, folder):
    start, counts, missing, failed, differ, new = time.time(), collections.Counter(), [], [], [], 0
    names = []

    def one(name, call, wanted=None):
        nonlocal new
        before = len(names)
        try:
            if DRY:
                names.extend(call())
            else:
                with observe(lambda launch: names.append(launch.name)):
                    found = [t.detach().cpu() for t in call() if isinstance(t, torch.Tensor)]
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            return
        seen = names[before:]
        counts.update(seen)
        if wanted and wanted not in seen:
            missing.append(f"{name} launched {sorted(set(seen))}, not {wanted}")
        if DRY or folder == "-":
            return
        path = Path(folder) / f"{group}-{name}.pt".replace(" ", "_").replace("/", "_")
        if not path.exists():
            torch.save(found, path)
            new += 1
        else:
            kept = torch.load(path)
            same = [
                a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
                for a, b in zip(found, kept, strict=True)
            ]
            if not all(same):
                differ.append(name)

    for name, (*layer, wanted) in LAYERS[group].items():
        from functools import partial

        one(name, partial(run_layer, *layer), wanted)
    if group == "ops" and not DRY:
        for name, call in ops():
            one(name, call)
    if not DRY and torch.cuda.is_available():
        torch.cuda.synchronize()
    for line in (*failed, *missing):
        print(f"PROBLEM {group}: {line}", flush=True)
    print(
        f"DONE {group}: launches {dict(counts)}, {new} results kept, {len(differ)} of others differ {differ}, "
        f"{time.time() - start:.0f} s",
        flush=True,
    )
    return 1 if failed or missing or differ else 0


if __name__ == "__main__":
    sys.exit(max([run_group(group, sys.argv[2]) for group in sys.argv[1].split(",")]))
