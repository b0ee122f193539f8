"""``moe explain``: which backend runs a layer, or each layer of a checkpoint, and why.

It also works for a GPU that is not installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_core.cli import _arguments, _fit, _prepare_finalize, _report
from moe_core.cli._all_layers import explain_all
from moe_core.cli._devices import Explained, compare
from moe_core.cli._fit import Figures
from moe_core.cli._output import emit
from moe_core.cli._select import select, select_over_ranks
from moe_core.cli.terminal.console import complain

if TYPE_CHECKING:
    from moe_core.cli._prepare_finalize import PrepareFinalizeSelection
    from moe_core.parallel.shard_plan import ShardPlan
    from moe_core.selection.memory import LayerMemory
    from moe_core.selection.report import SelectionReport


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code.
    """
    if len(args.devices) > 1:
        return compare(args, _explain)
    args.device = args.devices[0]
    if args.all_layers:
        return explain_all(args)
    one = _explain(args)
    emit(args.json, one.data, one.text)
    if not one.fits:
        what = "backend" if one.over_ranks is None else "prepare/finalize"
        complain(f"moe explain: no {what} fits; the report lists the reasons")
        return 2
    if one.fit is not None and not one.fit.fits:
        complain(_fit.refusal(one.fit, str(one.report.device)))
        return 1
    return 0


def _explain(args: argparse.Namespace) -> Explained:
    """Return the explanation for one device."""
    parallel = _arguments.parallel_of(args)
    found: dict[str, Any] = {}
    checkpoint, stored = None, 0
    plans: Sequence[ShardPlan] = ()
    over_ranks: PrepareFinalizeSelection | None = None
    if args.path is not None:
        checkpoint, notes = _arguments.opened(args)
        source = _arguments.source_of(args, checkpoint, parallel=parallel)
        source.check_fits()
        stored = source.layer.nbytes
        scheme, config, plans = source.scheme, source.config, source.plans
        keys = source.weight_key, source.activation_key
        found = {
            "checkpoint": str(args.path),
            "layer": source.index,
            "prefix": source.prefix,
            "format": source.format.name,
            "notes": [*notes, *([source.assumed] if source.assumed is not None else [])],
            "estimated": bool(notes),
        }
    else:
        config, weight_key, activation_key = _arguments.request_of(args)
        scheme, keys = args.scheme, (weight_key, activation_key)
        if parallel is not None:
            config, plans = _arguments.plans_of(config, keys, parallel)
    if parallel is None:
        report, memory = select(args, scheme, config, *keys)
    else:
        over_ranks, plan = select_over_ranks(args, scheme, config, plans, args.tokens, args.device)
        found["columns"] = {"ranges": [list(share) for share in plan.ranges], "how": str(plan)}
        report, memory = _chosen(over_ranks)
    # Layers are assumed to be equal; --all-layers reads each.
    count = 1 if checkpoint is None else len(checkpoint.moe_layers)
    layers = [] if memory is None else [(report, memory)]
    one, every = (Figures.of(n * layers, checkpoint, count * stored, parallel) for n in (1, count))
    data = {**found, **report.as_dict(), "memory": None if memory is None else vars(memory)}
    data |= {**one.as_dict(), "fit": every.as_dict()["fit"]}
    data["notes"] = [*found.get("notes", ()), *report.notes]
    if over_ranks is not None:
        data["parallel"] = over_ranks.as_dict()
    fits = report.chosen is not None and (over_ranks is None or over_ranks.chosen is not None)
    figures = Figures(every.fit, one.floors).lines()
    if count > 1 and every.fit is not None:
        figures += Figures(floors=every.floors).lines()
    text = _text(found, report, memory, args.verbose, over_ranks, figures)
    return Explained(data, text, report, memory, fits, over_ranks, every.fit)


def _chosen(over_ranks: PrepareFinalizeSelection) -> tuple[SelectionReport, LayerMemory | None]:
    """Return the report of the chosen class, else of the first one, and its memory.

    A rank may receive the tokens of all batches.
    """
    from moe_core.selection.memory import layer_memory

    chosen = over_ranks.chosen
    if chosen is None or chosen.selection is None:
        return over_ranks.candidates[0].report, None
    every = over_ranks.tokens * chosen.report.config.parallel.dp_size
    return chosen.report, layer_memory(chosen.selection, every)


def _text(
    found: dict[str, Any],
    report: SelectionReport,
    memory: LayerMemory | None,
    verbose: bool,
    over_ranks: PrepareFinalizeSelection | None,
    figures: list[str],
) -> str:
    lines = []
    if "checkpoint" in found:
        lines.append(f"{found['checkpoint']}: layer {found['layer']} ({found['prefix']}), {found['format']}")
    if verbose:
        lines.append(str(report))
    else:
        lines += [_report.verdict(report), *_report.layer(report), *_report.reasons(report)]
    lines += _report.note(report)
    if memory is not None:
        lines.append(_report.memory(report, memory))
    lines += figures
    if "columns" in found and len(found["columns"]["ranges"]) > 1:
        lines.append(f"  columns      {found['columns']['how']}")
    if over_ranks is not None:
        lines += _prepare_finalize.lines(over_ranks, verbose=verbose)
    lines += [f"note: {note}" for note in found.get("notes", ())]
    if not verbose:
        lines.append("-v: every backend with every reason")
    return "\n".join(lines)
