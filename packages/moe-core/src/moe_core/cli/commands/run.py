"""``moe run``: run one MoE layer of a checkpoint folder on given or random tokens."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moe_core._support.atomic_write import check_writable
from moe_core.cli import _arguments, _prepare_finalize, _report
from moe_core.cli._output import bytes_text, check_spares, duration, emit, progress, seconds_since
from moe_core.cli._ranks import Ranks, ranks_of
from moe_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moe_core.checkpoint import LayerSource
    from moe_core.cli._check import Check
    from moe_core.cli._prepare_finalize import PrepareFinalizeSelection
    from moe_core.cli._tensors import LayerInput
    from moe_core.layer.layer import FusedMoELayer
    from moe_core.parallel.shard_plan import ShardPlan


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
    outcome = run_layer(args, ranks)
    if ranks is not None and not ranks.is_first:
        return 0
    data, over_ranks, check = summary(args, outcome), outcome.over_ranks, outcome.check
    if over_ranks is not None:
        data["parallel"] = over_ranks.as_dict()
    exchange = [] if over_ranks is None else _prepare_finalize.lines(over_ranks, verbose=args.verbose)
    emit(args.json, data, _text(data, outcome, args.verbose, exchange))
    return 0 if check is None or check.passed else 1


@dataclass(frozen=True, eq=False)
class Outcome:
    """What running a layer showed.

    Attributes:
        source: The layer in the checkpoint.
        layer: The loaded layer.
        tokens: Its input.
        output: Its output for all tokens ``[M, K]``, on the CPU.
        seconds_load: Seconds to load the layer.
        seconds_run: Seconds of the last call.
        check: Comparison with the reference, if requested.
        over_ranks: Prepare/finalize classes over several ranks; None for a single rank.
    """

    source: LayerSource
    layer: FusedMoELayer
    tokens: LayerInput
    output: Tensor
    seconds_load: float
    seconds_run: float
    check: Check | None
    over_ranks: PrepareFinalizeSelection | None


def run_layer(args: argparse.Namespace, ranks: Ranks | None = None, *, calls: int = 1) -> Outcome:
    """Load a layer, run it and, if requested, compare its output.

    Args:
        args: Parsed arguments of ``moe run``.
        ranks: Ranks of the layer; None for a single one.
        calls: Number of calls; the first one compiles kernels.

    Returns:
        The outcome; only the first rank writes and compares the output.
    """
    from moe_core.checkpoint import Checkpoint
    from moe_core.layer.loading import load_requested

    device = _arguments.device_of(args.device) if ranks is None else ranks.device
    checkpoint = Checkpoint.open(args.path)
    source = _arguments.source_of(args, checkpoint)
    if args.output is not None:
        check_writable(args.output)
        check_spares(args.output, args.path, args.input)
    # Check everything about the tokens before gigabytes of weights are read.
    tokens = _tokens(args, source)
    several: dict[str, Any] = {}
    over_ranks, plan = None, None
    if ranks is not None:
        most = -(-tokens.hidden_states.shape[0] // ranks.parallel.dp_size)
        part = _arguments.source_of(args, checkpoint, parallel=ranks.parallel)
        over_ranks, chosen, plan = ranks.choose(args, part.scheme, part.config, part.plans, most)
        several = {"groups": ranks.groups(chosen), "max_num_tokens": max(most, 1)}
    with progress(f"loading layer {source.index} of {args.path}"):
        start = time.perf_counter()
        request = _arguments.layer_request_of(args, source.index, device=device)
        layer = load_requested(checkpoint, replace(request, **several))
        loading = seconds_since(start)
    with progress(f"running {tokens.hidden_states.shape[0]} tokens"):
        for _ in range(calls):
            output, running = _apply(layer, tokens, device, _arguments.dtype_of(args.dtype), ranks)
    is_first = ranks is None or ranks.is_first
    if args.output is not None and is_first:
        from moe_core.cli._tensors import write_output

        write_output(args.output, output)
    check = None
    if args.check and is_first:
        with progress("computing the float64 reference"):
            check = _check(args, source, layer, tokens, output, plan)
    return Outcome(source, layer, tokens, output, loading, running, check, over_ranks)


def _tokens(args: argparse.Namespace, source: LayerSource) -> LayerInput:
    import torch

    from moe_core.cli._tensors import LayerInput, read_input

    if args.input is not None:
        tokens = read_input(args.input, source.config, finite=args.check)
    else:
        generator = torch.Generator().manual_seed(args.seed)
        _arguments.check_room(args.tokens, source.config.hidden_size)
        x = torch.randn(args.tokens, source.config.hidden_size, generator=generator)
        origin = "checkpoint"
        if source.router_weight is not None:
            logits = x.to(source.config.dtype).float() @ source.router_weight.float().T
            logits = logits if source.router_bias is None else logits + source.router_bias
        else:
            origin = "random"
            logits = torch.randn(args.tokens, source.config.num_experts, generator=generator)
        tokens = LayerInput(x, router_logits=logits, origin=origin)
    if tokens.topk_ids is None and source.config.routing is None:
        raise CheckpointError(f"{source.routing_reason}: give topk_ids and topk_weights with --input")
    return tokens


def _apply(
    layer: FusedMoELayer, tokens: LayerInput, device: torch.device, dtype: torch.dtype, ranks: Ranks | None
) -> tuple[Tensor, float]:
    """Return the output for all tokens, on the CPU, and the seconds of the call."""
    import torch

    mine = slice(None) if ranks is None else ranks.share(tokens.hidden_states.shape[0])

    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[mine].to(device)

    with torch.inference_mode():
        x = tokens.hidden_states[mine].to(device=device, dtype=dtype)
        logits, weights, ids = moved(tokens.router_logits), moved(tokens.topk_weights), moved(tokens.topk_ids)
        start = time.perf_counter()
        output: Tensor = layer(x, router_logits=logits, topk_weights=weights, topk_ids=ids)
        # The copy waits for the device.
        result = output.float().cpu()
        seconds = seconds_since(start)
        return (result if ranks is None else ranks.gathered(result, shared_out=layer.kernel.shares_out)), seconds


def _check(
    args: argparse.Namespace,
    source: LayerSource,
    layer: FusedMoELayer,
    tokens: LayerInput,
    output: Tensor,
    plan: ShardPlan | None,
) -> Check:
    """Compare the output with the reference of the experts that have tokens.

    ``plan`` is the column split between ranks, or None for a single rank.
    """
    import torch

    from moe_core.cli._check import check_output, needs_all_experts
    from moe_core.cli._rank_parts import rank_parts
    from moe_core.parallel.shard import map_of

    weights, ids = tokens.topk_weights, tokens.topk_ids
    if weights is None or ids is None:
        logits = torch.as_tensor(tokens.router_logits, device=layer.weights.device)
        weights, ids = (tensor.cpu() for tensor in layer.route(logits))
    chosen = torch.arange(source.config.num_experts) if needs_all_experts(layer) else torch.unique(ids).long()
    chosen = chosen if len(chosen) else torch.zeros(1, dtype=torch.long)
    experts = chosen.tolist()
    part = _arguments.source_of(args, source.layer.checkpoint, source.index, experts=experts)
    if plan is None:
        parts = iter([(part.config, part.weights(), map_of(experts, source.config.num_experts, "cpu"))])
    else:
        parts = rank_parts(part.config, part.weights(), experts, layer.config.parallel, plan)
    x = tokens.hidden_states.to(source.config.dtype)
    return check_output(layer, parts, x, output, topk_weights=weights, topk_ids=ids)


def summary(args: argparse.Namespace, outcome: Outcome) -> dict[str, Any]:
    """Return the outcome, ready for JSON."""
    import torch

    source, layer, tokens, output = outcome.source, outcome.layer, outcome.tokens, outcome.output
    finite = torch.isfinite(output)
    return {
        "checkpoint": str(args.path),
        "layer": source.index,
        "prefix": source.prefix,
        "scheme": source.scheme,
        "format": source.format.name,
        "backend": layer.selection.backend,
        "tokens": output.shape[0],
        "routing": "topk pair of --input" if tokens.topk_ids is not None else f"{tokens.origin} router logits",
        "random_router_logits": tokens.origin == "random",
        "notes": _notes(source, tokens),
        "shape": list(output.shape),
        "dtype": str(source.config.dtype).removeprefix("torch."),
        "seconds_load": outcome.seconds_load,
        "seconds_run": outcome.seconds_run,
        "weight_bytes": layer.weights.nbytes,
        "output_rms": float(output.square().mean().sqrt()) if output.numel() and bool(finite.all()) else None,
        "output_not_finite": int((~finite).sum()),
        "output": None if args.output is None else str(args.output),
        "check": None if outcome.check is None else outcome.check.as_dict(),
        "selection": layer.selection.report.as_dict(),
    }


def _notes(source: LayerSource, tokens: LayerInput) -> list[str]:
    """Return notes that a reader of the result needs and the input does not state."""
    notes = [] if source.assumed is None else [source.assumed]
    if tokens.origin == "random":
        notes.append(
            f"router logits are random: {source.layer.block} has no router weight [E, hidden size] in floating point"
        )
    return notes


def _text(data: dict[str, Any], outcome: Outcome, verbose: bool, over_ranks: Sequence[str] = ()) -> str:
    report, check = outcome.layer.selection.report, outcome.check
    lines = [
        f"{data['checkpoint']}: layer {data['layer']} ({data['prefix']}), {data['format']}",
        str(report) if verbose else "\n".join([_report.verdict(report), *_report.reasons(report)]),
        *over_ranks,
        (
            f"loaded {bytes_text(data['weight_bytes'])} in {duration(data['seconds_load'])}; "
            f"{data['tokens']} tokens in {duration(data['seconds_run'])} (first call)"
        ),
    ]
    if data["output_rms"] is not None:
        lines.append(f"output {data['shape']} {data['dtype']}, root mean square {data['output_rms']:.4g}")
    if data["output_not_finite"]:
        lines.append(f"warning: {data['output_not_finite']} values of the output are NaN or Inf")
    if check is not None:
        lines.append(f"compared with the float64 reference: {check}")
        lines += [] if check.fault is None else [f"FAILED: {check.fault}"]
    lines += [f"note: {note}" for note in data["notes"]]
    if data["output"] is not None:
        lines.append(f"written to {data['output']}")
    return "\n".join(lines)
