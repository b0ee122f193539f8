"""``moe bench``: time of a layer per token count and backend, next to the machine's limits."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moe_core._support.atomic_write import check_writable, write_whole
from moe_core.cli import _arguments
from moe_core.cli._bench_ranks import calls_of, measure_ranks, timed_result
from moe_core.cli._layers import INPUTS, Layer, random_call, the_layer
from moe_core.cli._output import check_spares, duration, emit, progress, table
from moe_core.cli._ranks import Ranks, ranks_of
from moe_core.cli._timing import measure
from moe_core.selection.report import SelectionError
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import distribution_version

if TYPE_CHECKING:
    import torch

    from moe_core.cli._machine import Limits
    from moe_core.spec.weights import MoEWeights


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code.
    """
    with ranks_of(args) as ranks:
        return _run(args, ranks)


def _run(args: argparse.Namespace, ranks: Ranks | None) -> int:
    import torch

    from moe_core.cli._comparison import compare, read_results, slower
    from moe_core.spec.quant_key import key_name

    counts = args.tokens
    earlier = None if args.compare is None else read_results(args.compare)
    for path in (args.output, args.svg):
        if path is not None and (ranks is None or ranks.is_first):
            check_writable(path)
            check_spares(path, args.path, args.compare)
    device = _arguments.device_of(args.device) if ranks is None else ranks.device
    layer = the_layer(args, device)
    if args.activation_format == "batched":
        batched = _arguments.batched(layer.config, max(counts))
        layer = replace(layer, config=batched)
    selections = [] if ranks is not None else _selections(layer, device, args.backend, args.tuning)
    here = DeviceInfo.current(device)
    with torch.inference_mode():
        with progress("measuring the machine"):
            limits = _limits(args, layer, device)
        if ranks is not None:
            results = [*measure_ranks(args, layer, ranks, counts, limits)]
            if not ranks.is_first:
                return 0
        else:
            with progress("loading the weights"):
                weights = layer.weights()
            results = [
                result
                for selection in selections
                for result in _measure(layer, weights, selection, counts, device, limits, args.budget, args.skew)
            ]
    config = layer.config
    sizes = ("num_experts", "top_k", "hidden_size", "intermediate_size")
    data = {
        "layer": layer.what,
        "scheme": layer.scheme,
        "weight_key": key_name(layer.weight_key),
        "activation_key": key_name(layer.activation_key),
        **{name: getattr(config, name) for name in sizes},
        "activation": config.activation.value,
        "dtype": str(config.dtype).removeprefix("torch."),
        "activation_format": config.activation_format.value,
        "skew": args.skew,
        "device": here.arch,
        "device_name": here.name,
        **{name.replace("-", "_"): distribution_version(name) for name in ("moe-core", "torch", "triton")},
        "bandwidth_bytes_per_second": limits.bandwidth,
        "operations_per_second": limits.rate,
        "operations_of": limits.product,
        "tuning": [None if s.report.tuning is None else s.report.tuning.as_dict() for s in selections],
        "given": [name for name in ("bandwidth", "rate") if getattr(args, name) is not None],
        "ranks": None if ranks is None else ranks.sizes,
        "results": results,
    }
    if earlier is not None:
        compare(data, earlier, args.compare)
    if args.output is not None:
        write_whole(args.output, (json.dumps(data, indent=2) + "\n").encode())
    if args.svg is not None:
        from moe_core.cli._picture import svg

        write_whole(args.svg, svg(data).encode())
    emit(args.json, data, _text(data))
    return 1 if args.fail_slower is not None and slower(data, args.fail_slower) else 0


def _limits(args: argparse.Namespace, layer: Layer, device: torch.device) -> Limits:
    """Return the given limits, and measure the others."""
    from moe_core.cli import _machine

    bandwidth = None if args.bandwidth is None else 1e9 * args.bandwidth
    rate = None if args.rate is None else 1e12 * args.rate
    if bandwidth is not None and rate is not None:
        return _machine.Limits(bandwidth, rate, product="")
    measured = _machine.measure_limits(device, layer.config, layer.activation_key)
    return replace(measured, bandwidth=bandwidth or measured.bandwidth, rate=rate or measured.rate)


def _selections(layer: Layer, device: torch.device, names: str | None, tuning: str | None) -> list[Any]:
    if names is not None:
        return [layer.select(name, device, tuning) for name in names.split(",")]
    report = layer.select("auto", device, tuning).report
    fitting = dict.fromkeys(candidate.backend for candidate in report.candidates if candidate.fits)
    selections = [layer.select(name, device, tuning) for name in fitting]
    modular = [s for s in selections if not s.experts.is_monolithic]
    if not modular:
        raise SelectionError("no modular backend fits: only modular backends take a given routing", report)
    return modular


def _measure(
    layer: Layer,
    weights: MoEWeights,
    selection: Any,
    counts: Sequence[int],
    device: torch.device,
    limits: Limits,
    budget: float,
    skew: float,
) -> Iterator[dict[str, Any]]:
    """Yield the measurement of the selected backend for each number of tokens."""
    from moe_core.selection.registry import registry

    oracle = registry().oracle(layer.scheme)
    with progress(f"{selection.backend}: converting the weights"):
        kernel = oracle.make_kernel(selection, oracle.convert(selection, weights))
    for count in counts:
        with progress(f"{selection.backend}: {count} tokens"):
            inputs = [random_call(layer.config, count, device, seed, skew=skew) for seed in range(INPUTS)]
            calls = calls_of(kernel, inputs)
            timing = measure(calls, device, graph=selection.experts.claims.cuda_graph, budget=budget)
        active = sum(len(set(ids.flatten().tolist())) for _, _, ids in inputs) / len(inputs)
        floor = limits.floor(layer.config, weights.nbytes, active, count)[0]
        yield timed_result(selection.backend, count, active, timing, floor)


def _text(data: dict[str, Any]) -> str:
    compared = data.get("compared_with")
    rows = []
    for count in dict.fromkeys(result["tokens"] for result in data["results"]):
        here = [result for result in data["results"] if result["tokens"] == count]
        for number, result in enumerate(here):
            shared = [str(count), f"{result['active_experts']:.0f}", duration(result["floor_seconds"])]
            rows.append(
                [
                    *(shared if number == 0 else ["", "", ""]),
                    result["backend"],
                    duration(result["seconds"]),
                    _spread(result),
                    f"{result['time_over_floor']:.3g}",
                    *(["", ""] if compared is not None else [str(result["calls"])]),
                ]
            )
            if compared is not None and "ratio" in result:
                rows[-1][-2:] = [duration(result["before_seconds"]), f"{result['ratio']:.2f} {result['moved']}".strip()]
    more = ["calls"] if compared is None else ["before", "now/before"]
    header = ["tokens", "experts", "floor", "backend", "time", "spread", "time/floor", *more]
    layer = f"{data['layer']}, routing skewed by {data['skew']:g}" if data["skew"] else data["layer"]
    sizes = data["ranks"]
    where = f"{data['device_name']} ({data['device']})"
    if sizes is not None:
        spread = ", ".join(f"{name.removesuffix('_size')} {size}" for name, size in sizes.items())
        where = f"{sizes['tp_size'] * sizes['ep_size']} x {where} ({spread}; tokens and floor of each)"
    lines = [
        f"{data['scheme']}, {layer}, on {where}, torch {data['torch']}",
        _limits_text(data),
    ]
    for item in data["tuning"]:
        if item is not None:
            how = f"used, {item['ranges']} ranges of tokens" if item["used"] else f"not used: {item['reason']}"
            lines.append(f"tuning: {item['source']}: {how}")
    if compared is not None:
        then = f"{compared['device_name']}, torch {compared['torch']}, moe-core {compared['moe_core']}"
        lines.append(f"before: {compared['file']} ({then})")
    return "\n".join([*lines, "", table(header, rows)])


def _spread(result: dict[str, Any]) -> str:
    """Return text such as "-1/+4 %": from the median to the 10th and to the 90th percentile."""
    low, high = (100 * (bound / result["seconds"] - 1) for bound in result["seconds_p10_p90"])
    return f"-{abs(low):.0f}/+{abs(high):.0f} %"


def _limits_text(data: dict[str, Any]) -> str:
    of = f"{data['operations_of']} " if data["operations_of"] else ""
    bandwidth = f"{data['bandwidth_bytes_per_second'] / 1e9:.0f} GB/s"
    rate = f"{data['operations_per_second'] / 1e9:.0f} billion {of}operations/s"
    given = {"bandwidth": bandwidth, "rate": rate}
    parts = [f"{text} ({'given' if name in data['given'] else 'measured here'})" for name, text in given.items()]
    return f"limits: {', '.join(parts)}"
