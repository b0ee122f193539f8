"""A layer over the GPUs of one host: each way of bringing tokens to the experts, beside a GPU's share computed alone.

    python benchmarks/distributed.py [--json FILE] [--ranks 2] [--schemes fp8_block int8] [--ways low_latency]
                                     [--decode 8 16 32 64] [--prefill 16384 4096 1024] [--seconds 45]

Starts the ranks by itself, anew for each scheme, and goes on where one fails or takes longer than ``--seconds``; what
it has measured until then is kept.  Expert parallelism, tokens of each rank's own.  Per way and number of tokens M of
each rank, in microseconds, the slowest rank's medians:

- ``us``: a call of the layer; in a CUDA graph where the way can be captured
- ``alone_us``: a rank's experts on the tokens that it gets, without any way
- ``bytes``: what the rank that sends or gets most sends or gets, there and back; ``wire_us``: these over the measured
  bandwidth between GPUs
- ``over_us``: ``us - alone_us``; ``efficiency``: the larger of ``alone_us`` and ``wire_us`` over ``us``

Ends with 1 where something failed, another way was taken, or an output differs from that of the all-gather.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from graph_time import heat_up
from moe_core import (
    FusedMoEConfig,
    FusedMoEKernel,
    FusedMoEParallelConfig,
    MoEWeights,
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kMxfp4Static,
    registry,
)
from moe_core.distributed import ParallelGroups
from moe_core.ops.token_layout import TokenCode, TokenLayout
from moe_core.prepare_finalize import PrepareAndFinalizeNoParallel
from moe_core.testing.ranks import run_ranks
from moe_core.weights import scale_shape
from torch import Tensor

E, TOP_K, K, N = 128, 8, 4096, 1536  # of Qwen3-235B-A22B
SCHEMES: dict[str, tuple[str, QuantKey, QuantKey | None]] = {
    "fp8_block": ("fp8", kFp8Static128BlockSym, kFp8Dynamic128Sym),
    "fp8_channel": ("fp8", kFp8StaticChannelSym, kFp8DynamicTokenSym),
    "int8": ("int8", kInt8StaticChannelSym, kInt8DynamicTokenSym),
    "mxfp4": ("mxfp4", kMxfp4Static, None),
}
WAYS = ("low_latency", "alltoall", "allgather_reducescatter")
#: most tokens per rank of the way for decode
LOW_LATENCY = 128
CALLS, REPLAYS = 8, 15


def weights(config: FusedMoEConfig, weight_key: QuantKey, activation_key: QuantKey | None) -> MoEWeights:
    """Random codes, and scales that keep values of a usual size."""
    experts, tensors = config.local_experts, {}
    for name, rows, cols, parts in (("w13", 2 * N, K, 2), ("w2", K, N, 1)):
        shape = scale_shape(weight_key, experts, rows, cols, parts)
        if weight_key == kMxfp4Static:
            tensors[name] = torch.randint(256, (experts, rows, cols // 2), dtype=torch.uint8, device="cuda")
            tensors[f"{name}_scale"] = torch.randint(118, 122, shape, dtype=torch.uint8, device="cuda")
            continue
        if weight_key.dtype == kInt8StaticChannelSym.dtype:
            tensors[name] = torch.randint(-127, 128, (experts, rows, cols), dtype=torch.int8, device="cuda")
            size = 73.0
        else:
            codes = torch.randint(256, (experts, rows, cols), dtype=torch.uint8, device="cuda") & 0xBF
            tensors[name], size = codes.view(torch.float8_e4m3fn), 0.5  # |codes| < 2: no NaN
        scale = torch.rand(shape, device="cuda") + 0.5
        tensors[f"{name}_scale"] = (scale / (size * cols**0.5)).to(weight_key.scale.dtype)
    return MoEWeights(weight_key=weight_key, activation_key=activation_key, **tensors)


def inputs(tokens: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x, topk_weights, topk_ids) of a rank, the same on every rank that asks."""
    generator = torch.Generator().manual_seed(1000 * tokens + rank)
    x = torch.randn(tokens, K, generator=generator).to(torch.bfloat16)
    best = torch.rand(tokens, E, generator=generator).topk(TOP_K)
    scores = best.values / best.values.sum(1, keepdim=True)
    return x.cuda(), scores.cuda(), best.indices.int().cuda()


def slowest(value: float) -> float:
    """The most that any rank has."""
    tensor = torch.tensor([value], dtype=torch.float64, device="cuda")
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def timed(call: Callable[[], object], *, graph: bool, calls: int = 1) -> float:
    """Microseconds of a call, the slowest rank's median; ``calls`` in a graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    calls = calls if graph else 1
    replay = call
    if graph:
        stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), torch.cuda.graph(captured, stream=stream):
            for _ in range(calls):
                call()
        replay = captured.replay
    times = []
    for _ in range(REPLAYS + 3):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return slowest(statistics.median(times[3:]))


def bandwidth(rank: int, ranks: int) -> dict[str, float]:
    """Bytes per second that a GPU sends while it gets as many: NCCL's all-to-all; stores into another's memory."""
    nbytes = 256 * 2**20
    found = {}
    out, back = (torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    us = timed(lambda: dist.all_to_all_single(back, out), graph=False)
    found["nccl"] = nbytes * (ranks - 1) / ranks / us * 1e6
    small = torch.zeros(ranks * 16, dtype=torch.uint8, device="cuda")
    found["nccl_small_us"] = timed(
        lambda: dist.all_to_all_single(torch.empty_like(small), small), graph=True, calls=CALLS
    )
    try:
        import torch.distributed._symmetric_memory as symm_mem
        from moe_core.distributed.symmetric import _without_multicast

        with _without_multicast():
            memory = symm_mem.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", rank))
            handle = symm_mem.rendezvous(memory, dist.group.WORLD)
        there = handle.get_buffer((rank + 1) % ranks, (nbytes,), torch.uint8)
        found["push"] = nbytes / timed(lambda: there.copy_(out), graph=False) * 1e6
    except Exception as error:  # what is left is measured without it
        print(f"rank {rank}: no symmetric memory: {error}", file=sys.stderr)
    return found


def traffic(way: str, tokens: int, ranks: int, code: TokenCode) -> int:
    """Bytes that the rank with most of them sends or gets, there and back."""
    there, back = TokenLayout.rows(code, TOP_K).nbytes, 2 * K
    if way == "allgather_reducescatter":
        return tokens * (ranks - 1) * (there + back)
    # [from, to]: tokens that cross
    crossing = torch.zeros(ranks, ranks)
    for source in range(ranks):
        owners = inputs(tokens, source)[2].cpu() // (E // ranks)
        for target in range(ranks):
            if target != source:
                crossing[source, target] = (owners == target).any(1).sum()
    sent, got = crossing.sum(1), crossing.sum(0)
    return int(torch.maximum(sent * there + got * back, got * there + sent * back).max())


def measure(rank: int, scheme: str, ways: list[str], tokens: list[int], file: str, seconds: float) -> None:
    """All ways of a scheme; rank 0 writes a line of JSON for each point as soon as it has it."""
    end = time.monotonic() + seconds
    ranks = dist.get_world_size()

    def write(**row: Any) -> None:
        if rank == 0:
            with Path(file).open("a") as out:
                out.write(json.dumps({"scheme": scheme, **row}) + "\n")

    heat_up()
    speed = bandwidth(rank, ranks)
    write(bandwidth=speed)
    link = max(value for name, value in speed.items() if name != "nccl_small_us")
    everyone = ParallelGroups.create(dp_size=ranks, timeout=20)
    name, weight_key, activation_key = SCHEMES[scheme]
    oracle = registry().oracle(name)
    parallel = FusedMoEParallelConfig.of_rank(rank, ep_size=ranks, dp_size=ranks)
    config = FusedMoEConfig(num_experts=E, top_k=TOP_K, hidden_size=K, intermediate_size=N, parallel=parallel)
    selection = oracle.select(config, weight_key=weight_key, activation_key=activation_key, device="cuda")
    converted = oracle.convert(selection, weights(config, weight_key, activation_key))
    experts = oracle.make_experts(selection)
    alone = FusedMoEKernel(experts, converted, PrepareAndFinalizeNoParallel(config))
    first = rank * (E // ranks)
    expert_map = torch.full((E,), -1, dtype=torch.int32, device="cuda")
    expert_map[first : first + E // ranks] = torch.arange(E // ranks, dtype=torch.int32, device="cuda")
    code = TokenCode(K, torch.bfloat16, activation_key if experts.takes_quantized else None)
    kernels: dict[tuple[str, int], FusedMoEKernel] = {}
    for count in tokens:
        if slowest(float(time.monotonic() > end)):
            write(M=count, failed=f"not measured: {seconds:g} s were over")
            continue
        x, scores, ids = inputs(count, rank)
        everything = [
            torch.cat(parts) for parts in zip(*(inputs(count, source) for source in range(ranks)), strict=True)
        ]
        # the tokens that come here, each once
        mine = ((everything[2] // (E // ranks)) == rank).any(1)
        came = [part[mine] for part in everything]

        def share(came: list[Tensor] = came) -> Tensor:
            return alone.apply(came[0], topk_weights=came[1], topk_ids=came[2], expert_map=expert_map)

        calls = CALLS if count <= 512 else 1
        alone_us = timed(share, graph=True, calls=calls)
        expected: Tensor | None = None
        # the one that others are compared with comes first
        for way in sorted(ways):
            if way == "low_latency" and count > LOW_LATENCY:
                continue
            room = count if way == "low_latency" else 0
            try:
                if (way, room) not in kernels:
                    groups = everyone.with_tokens(ranks, way)
                    own = replace(config, parallel=groups.parallel, max_num_tokens=room or None)
                    made = oracle.select(own, weight_key=weight_key, activation_key=activation_key, device="cuda")
                    kernels[way, room] = oracle.make_kernel(made, converted, groups=groups)
                kernel = kernels[way, room]

                def call(kernel: FusedMoEKernel = kernel, x=x, scores=scores, ids=ids, count=count) -> Tensor:
                    return kernel.apply(x, topk_weights=scores, topk_ids=ids, tokens_per_rank=[count] * ranks)

                found = call().float()
                expected = found if expected is None else expected
                error = slowest(float((found - expected).norm() / expected.norm()))
                taken = kernel.prepare_finalize.name
                us = timed(call, graph=kernel.prepare_finalize.claims.cuda_graph, calls=calls)
            except Exception as failure:  # of this way; the others go on
                write(M=count, way=way, failed=f"{type(failure).__name__}: {failure}"[:500])
                continue
            nbytes = traffic(way, count, ranks, code)
            wire_us = nbytes / link * 1e6
            write(
                M=count,
                way=way,
                taken=taken,
                backend=selection.backend,
                us=us,
                alone_us=alone_us,
                over_us=us - alone_us,
                bytes=nbytes,
                wire_us=wire_us,
                efficiency=max(alone_us, wire_us) / us,
                error=error,
            )


def main() -> int:
    """Prints a line for each point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--decode", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--prefill", type=int, nargs="*", default=[16384, 4096, 1024])
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if torch.cuda.device_count() < options.ranks:
        print(f"{options.ranks} ranks need as many GPUs, there are {torch.cuda.device_count()}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    for scheme in options.schemes:
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            tokens = [*options.decode, *options.prefill]
            try:
                run_ranks(
                    measure,
                    scheme,
                    options.ways,
                    tokens,
                    file.name,
                    options.seconds - 15,
                    ranks=options.ranks,
                    backend="nccl",
                    seconds=options.seconds,
                )
            except AssertionError as error:  # a rank failed or did not end
                rows.append({"scheme": scheme, "failed": str(error)[-1000:]})
            found = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
        rows += found
        for row in found:
            print("  ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)
        if options.json is not None:
            meta = {
                "gpu": torch.cuda.get_device_name(0),
                "ranks": options.ranks,
                "torch": torch.__version__,
                "layer": {"E": E, "k": TOP_K, "K": K, "N": N},
            }
            results = [
                {"shape": f"EP{options.ranks}", "peer": row["way"], **row}
                for row in rows
                if "way" in row and "us" in row
            ]
            other = [row for row in rows if "us" not in row]
            content = {"meta": meta, "results": _points(results), "other": other}
            options.json.write_text(json.dumps(content, indent=2) + "\n")
    wrong = [
        row for row in rows if "failed" in row or row.get("error", 0.0) > 2.0**-6 or row.get("taken") != row.get("way")
    ]
    for row in wrong:
        print(f"wrong: {row}", file=sys.stderr)
    return 1 if wrong else 0


def _points(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a shape, scheme and peer together, as the runner of the other benchmarks writes them."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        key = {name: row[name] for name in ("shape", "scheme", "peer")}
        entry = found.setdefault(tuple(key.values()), {**key, "points": []})
        entry["points"].append({name: value for name, value in row.items() if name not in key})
    return list(found.values())


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
