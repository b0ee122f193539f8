"""A layer on the GPUs of one host: each all2all backend, compared with one rank alone.

    python benchmarks/distributed.py [--json FILE] [--ranks 2] [--schemes fp8_block int8] [--backends low_latency]
                                     [--layers top8 top1] [--decode 8 16 32 64] [--prefill 16384 4096 1024]
                                     [--seconds 45]
    python benchmarks/distributed.py --profile FOLDER --backends alltoall --decode 16 --prefill 16384

The script starts the ranks itself, once per scheme and layer. If one fails or exceeds ``--seconds``, the script keeps
what was measured and continues. It uses expert parallelism, and each rank has separate tokens. With one or two experts
per token, an all-to-all sends a fraction of what an all-gather does. For each all2all backend and number of tokens M
per rank, it reports the slowest rank's medians, in microseconds:

- ``us``: a call of the layer, in a CUDA graph if it can be captured
- ``eager_us``: the same without a graph; ranks then exchange their token counts
- ``host_us``: host time of such a call, which does not wait for the GPU; up to 512 tokens
- ``alone_us``: one rank's experts on the tokens it receives, without communication
- ``bytes``: traffic of the rank that sends or receives most, dispatch and combine; ``wire_us``: the same at the
  measured
  bandwidth between GPUs
- ``over_us``: ``us - alone_us``; ``efficiency``: the larger of ``alone_us`` and ``wire_us``, over ``us``

The exit code is 1 if something failed, another backend was used, or an output differs from that of the all-gather.
``--profile`` instead writes what the first rank's GPU and host do in each call, kernel by kernel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from moe_core.kernels.ops.token_layout import TokenCode, TokenLayout
from moe_core.parallel.distributed import ParallelGroups
from moe_core.parallel.prepare_finalize.no_parallel import PrepareAndFinalizeNoParallel
from moe_core.spec.roles import scale_shape
from moe_core.spec.workspace import Workspace
from moe_kit.ranks import run_ranks
from torch import Tensor


class Layer(NamedTuple):
    """Experts, experts per token, hidden size, intermediate size."""

    E: int
    k: int
    K: int
    N: int


LAYERS = {
    "top8": Layer(128, 8, 4096, 1536),  # Qwen3-235B-A22B
    "top2": Layer(8, 2, 4096, 14336),  # Mixtral-8x7B
    "top1": Layer(16, 1, 5120, 8192),  # Llama-4-Scout
}
SCHEMES: dict[str, tuple[str, QuantKey, QuantKey | None]] = {
    "fp8_block": ("fp8", kFp8Static128BlockSym, kFp8Dynamic128Sym),
    "fp8_channel": ("fp8", kFp8StaticChannelSym, kFp8DynamicTokenSym),
    "int8": ("int8", kInt8StaticChannelSym, kInt8DynamicTokenSym),
    "mxfp4": ("mxfp4", kMxfp4Static, None),
}
ALL2ALL_BACKENDS = ("low_latency", "alltoall", "allgather_reducescatter")
#: maximum tokens per rank of the decode backend
LOW_LATENCY = 128
CALLS, REPLAYS = 8, 15


def weights(config: FusedMoEConfig, weight_key: QuantKey, activation_key: QuantKey | None) -> MoEWeights:
    """Generate random codes, with scales that keep values in a typical range."""
    experts, tensors = config.local_experts, {}
    hidden, inner = config.hidden_size, config.intermediate_size
    for name, rows, cols, parts in (("w13", 2 * inner, hidden, 2), ("w2", hidden, inner, 1)):
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


def inputs(layer: Layer, tokens: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x, topk_weights, topk_ids) of a rank, identical on every rank that requests them."""
    generator = torch.Generator().manual_seed(1000 * tokens + rank)
    x = torch.randn(tokens, layer.K, generator=generator).to(torch.bfloat16)
    best = torch.rand(tokens, layer.E, generator=generator).topk(layer.k)
    scores = best.values / best.values.sum(1, keepdim=True)
    return x.cuda(), scores.cuda(), best.indices.int().cuda()


def slowest(value: float) -> float:
    """Return the maximum over all ranks."""
    tensor = torch.tensor([value], dtype=torch.float64, device="cuda")
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def timed(call: Callable[[], object], *, graph: bool, calls: int = 1) -> float:
    """Return microseconds per call, the slowest rank's median over ``calls`` consecutive calls.

    Ranks leave a barrier at different times, which would be a large part of a single call's time.
    """

    def several() -> None:
        for _ in range(calls):
            call()

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    run = several
    if graph:
        stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), torch.cuda.graph(captured, stream=stream):
            several()
        run = captured.replay
    times = []
    for _ in range(REPLAYS + 3):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return slowest(statistics.median(times[3:]))


def host_time(call: Callable[[], object]) -> float:
    """Return the host's microseconds per call, the slowest rank's median over enqueued calls.

    The calls of a sample are few enough for the GPU's queue. Ranks that exchange token counts wait for each other.
    """
    times = []
    for _ in range(REPLAYS + 3):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(2 * CALLS):
            call()
        times.append((time.perf_counter() - start) * 1e6 / (2 * CALLS))
    torch.cuda.synchronize()
    return slowest(statistics.median(times[3:]))


def bandwidth(rank: int, ranks: int) -> dict[str, float]:
    """Measure a GPU's bidirectional bandwidth in bytes per second.

    Covers NCCL's all-to-all and stores to a peer's memory.
    """
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
        from moe_core.parallel.distributed.symmetric import _without_multicast

        with _without_multicast():
            memory = symm_mem.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", rank))
            handle = symm_mem.rendezvous(memory, dist.group.WORLD)
        there = handle.get_buffer((rank + 1) % ranks, (nbytes,), torch.uint8)
        found["push"] = nbytes / timed(lambda: there.copy_(out), graph=False) * 1e6
    except Exception as error:  # the remaining measurements run without it
        print(f"rank {rank}: no symmetric memory: {error}", file=sys.stderr)
    return found


def traffic(all2all: str, layer: Layer, tokens: int, ids: list[Tensor], code: TokenCode) -> int:
    """Return the bytes that the busiest rank sends or receives, dispatch and combine.

    ``ids`` are the expert ids of each rank's tokens.
    """
    ranks = len(ids)
    there, back = TokenLayout.rows(code, layer.k).nbytes, 2 * layer.K
    if all2all == "allgather_reducescatter":
        return tokens * (ranks - 1) * (there + back)
    # [from, to]: tokens sent between ranks
    crossing = torch.zeros(ranks, ranks)
    for source in range(ranks):
        owners = ids[source].cpu() // (layer.E // ranks)
        for target in range(ranks):
            if target != source:
                crossing[source, target] = (owners == target).any(1).sum()
    sent, got = crossing.sum(1), crossing.sum(0)
    return int(torch.maximum(sent * there + got * back, got * there + sent * back).max())


class Ranks:
    """What a layer's ranks share: experts converted once for all all2all backends."""

    def __init__(self, rank: int, scheme: str, layer: Layer) -> None:
        self.rank, self.layer, self.ranks = rank, layer, dist.get_world_size()
        self.everyone = ParallelGroups.create(dp_size=self.ranks, timeout=20)
        name, weight_key, activation_key = SCHEMES[scheme]
        self._keys = {"weight_key": weight_key, "activation_key": activation_key, "device": "cuda"}
        self._oracle = registry().oracle(name)
        parallel = FusedMoEParallelConfig.of_rank(rank, ep_size=self.ranks, dp_size=self.ranks)
        self.config = FusedMoEConfig(
            num_experts=layer.E, top_k=layer.k, hidden_size=layer.K, intermediate_size=layer.N, parallel=parallel
        )
        self.selection = self._oracle.select(self.config, **self._keys)
        self._converted = self._oracle.convert(self.selection, weights(self.config, weight_key, activation_key))
        experts = self._oracle.make_experts(self.selection)
        # Shared as in an engine, so that tensor-map descriptors of the workspace persist and eager calls are replayed.
        self._workspace = Workspace("cuda")
        alone = PrepareAndFinalizeNoParallel(self.config)
        self.alone = FusedMoEKernel(experts, self._converted, alone, workspace=self._workspace)
        self.code = TokenCode(layer.K, torch.bfloat16, activation_key if experts.takes_quantized else None)
        self._kernels: dict[tuple[str, int], FusedMoEKernel] = {}

    @property
    def held(self) -> int:
        """Experts per rank."""
        return self.layer.E // self.ranks

    def kernel(self, all2all: str, tokens: int) -> FusedMoEKernel:
        """Return the layer's kernel with an all2all backend."""
        room = tokens if all2all == "low_latency" else 0
        if (all2all, room) not in self._kernels:
            groups = self.everyone.with_tokens(self.ranks, all2all)
            own = replace(self.config, parallel=groups.parallel, max_num_tokens=room or None)
            made = self._oracle.select(own, **self._keys)
            self._kernels[all2all, room] = self._oracle.make_kernel(
                made, self._converted, groups=groups, workspace=self._workspace
            )
        return self._kernels[all2all, room]


def measure(
    rank: int, scheme: str, layer: Layer, backends: list[str], tokens: list[int], file: str, seconds: float
) -> None:
    """Measure every all2all backend of a scheme; rank 0 immediately appends each point as JSON."""
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
    shared = Ranks(rank, scheme, layer)
    held = shared.held
    expert_map = torch.full((layer.E,), -1, dtype=torch.int32, device="cuda")
    expert_map[rank * held : (rank + 1) * held] = torch.arange(held, dtype=torch.int32, device="cuda")
    for count in tokens:
        if slowest(float(time.monotonic() > end)):
            write(M=count, failed=f"not measured: {seconds:g} s were over")
            continue
        each = [inputs(layer, count, source) for source in range(ranks)]
        x, scores, ids = each[rank]
        everything = [torch.cat(parts) for parts in zip(*each, strict=True)]
        # tokens that this rank receives, each once
        mine = ((everything[2] // held) == rank).any(1)
        came = [part[mine] for part in everything]

        brought = [count] * ranks

        def share(came: list[Tensor] = came, brought: list[int] = brought) -> Tensor:
            return shared.alone.apply(
                came[0], topk_weights=came[1], topk_ids=came[2], expert_map=expert_map, tokens_per_rank=brought
            )

        calls = CALLS if count <= 512 else 1
        alone_us = timed(share, graph=True, calls=calls)
        expected: Tensor | None = None
        # the reference for comparisons comes first
        for all2all in sorted(backends):
            if all2all == "low_latency" and count > LOW_LATENCY:
                continue
            try:
                kernel = shared.kernel(all2all, count)

                def call(
                    counts: list[int] | None = None, kernel: FusedMoEKernel = kernel, x=x, scores=scores, ids=ids
                ) -> Tensor:
                    return kernel.apply(x, topk_weights=scores, topk_ids=ids, tokens_per_rank=counts)

                found = call().float()
                expected = found if expected is None else expected
                error = slowest(float((found - expected).norm() / expected.norm()))
                taken = kernel.prepare_finalize.name
                eager_us = timed(call, graph=False, calls=calls)
                host_us = host_time(call) if count <= 512 else None
                us = eager_us
                if kernel.prepare_finalize.capturable:
                    us = timed(partial(call, [count] * ranks), graph=True, calls=calls)
            except Exception as failure:  # continue with the other backends
                write(M=count, all2all=all2all, failed=f"{type(failure).__name__}: {failure}"[:500])
                continue
            nbytes = traffic(all2all, layer, count, [one[2] for one in each], shared.code)
            wire_us = nbytes / link * 1e6
            write(
                M=count,
                all2all=all2all,
                taken=taken,
                backend=shared.selection.backend,
                us=us,
                eager_us=eager_us,
                host_us=host_us,
                alone_us=alone_us,
                over_us=us - alone_us,
                bytes=nbytes,
                wire_us=wire_us,
                efficiency=max(alone_us, wire_us) / us,
                error=error,
            )


def profile(rank: int, scheme: str, layer: Layer, backends: list[str], tokens: list[int], folder: str) -> None:
    """Profile an eager call with each all2all backend; rank 0 writes one text file per backend."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    heat_up()
    shared = Ranks(rank, scheme, layer)
    for count in tokens:
        x, scores, ids = inputs(layer, count, rank)
        for all2all in backends:
            if all2all == "low_latency" and count > LOW_LATENCY:
                continue
            kernel = shared.kernel(all2all, count)
            for _ in range(5):
                kernel.apply(x, topk_weights=scores, topk_ids=ids)
            dist.barrier()
            torch.cuda.synchronize()
            # two calls, since the first includes the profiler's startup
            with profiled(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
                for _ in range(2):
                    started = time.perf_counter()
                    kernel.apply(x, topk_weights=scores, topk_ids=ids)
                    host = time.perf_counter() - started
                    torch.cuda.synchronize()
            dist.barrier()
            if rank == 0:
                told = f"{all2all}, {count} tokens of each of {shared.ranks} ranks, {scheme}, {layer}"
                text = f"{told}\nhost: {host * 1e6:.0f} us of the second call under the profiler\n\n{_timeline(trace)}"
                (Path(folder) / f"{scheme}-{layer.k}-{all2all}-{count}.txt").write_text(text)


def _timeline(trace: Any) -> str:
    """Format the GPU's kernels and copies in order, and the table of host activity."""
    events = sorted(
        (event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA),
        key=lambda event: event.time_range.start,
    )
    lines, last = [f"{'start us':>10} {'us':>8} {'gap us':>8}  on the GPU"], None
    for event in events:
        start, end = event.time_range.start, event.time_range.end
        gap = 0.0 if last is None else start - last
        first = events[0].time_range.start
        lines.append(f"{start - first:10.1f} {end - start:8.1f} {gap:8.1f}  {event.name[:90]}")
        last = end if last is None else max(last, end)
    table = trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60)
    return "\n".join([*lines, "", table, ""])


def main() -> int:
    """Run the command line; prints a line per point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["top8", "top1"])
    parser.add_argument("--backends", nargs="+", choices=ALL2ALL_BACKENDS, default=list(ALL2ALL_BACKENDS))
    parser.add_argument("--decode", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--prefill", type=int, nargs="*", default=[16384, 4096, 1024])
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write what a call does in place of times")
    options = parser.parse_args()
    if torch.cuda.device_count() < options.ranks:
        print(f"{options.ranks} ranks need as many GPUs, there are {torch.cuda.device_count()}", file=sys.stderr)
        return 2
    tokens = [*options.decode, *options.prefill]
    started = {"ranks": options.ranks, "backend": "nccl", "seconds": options.seconds}
    rows: list[dict[str, Any]] = []
    for scheme, name in itertools.product(options.schemes, options.layers):
        layer = LAYERS[name]
        if options.profile is not None:
            options.profile.mkdir(parents=True, exist_ok=True)
            run_ranks(profile, scheme, layer, options.backends, tokens, str(options.profile), **started)
            continue
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            failures = []
            try:
                run_ranks(measure, scheme, layer, options.backends, tokens, file.name, options.seconds - 15, **started)
            except AssertionError as error:  # a rank failed or timed out
                failures = [{"scheme": scheme, "failed": str(error)[-1000:]}]
            found = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
        found = [{"layer": name, **row} for row in [*failures, *found]]
        rows += found
        for row in found:
            print("  ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)
        if options.json is not None:
            meta = {
                "gpu": torch.cuda.get_device_name(0),
                "ranks": options.ranks,
                "torch": torch.__version__,
                "layers": {name: LAYERS[name]._asdict() for name in options.layers},
            }
            results = [
                {"shape": f"EP{options.ranks}", "peer": row["all2all"], **row}
                for row in rows
                if "all2all" in row and "us" in row
            ]
            other = [row for row in rows if "us" not in row]
            content = {"meta": meta, "results": _points(results), "other": other}
            options.json.write_text(json.dumps(content, indent=2) + "\n")
    wrong = [
        row
        for row in rows
        if "failed" in row or row.get("error", 0.0) > 2.0**-6 or row.get("taken") != row.get("all2all")
    ]
    for row in wrong:
        print(f"wrong: {row}", file=sys.stderr)
    return 1 if wrong else 0


def _points(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Group rows by shape, layer, scheme and peer, like the other benchmarks' runner."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        key = {name: row[name] for name in ("shape", "layer", "scheme", "peer")}
        entry = found.setdefault(tuple(key.values()), {**key, "points": []})
        entry["points"].append({name: value for name, value in row.items() if name not in key})
    return list(found.values())


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
