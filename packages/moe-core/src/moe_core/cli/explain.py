"""moe explain: which backend runs a layer, or every layer of a checkpoint, and why; also for a GPU that is not here."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from moe_core_cli.terminal.console import complain

from moe_core.cli import _arguments, _report
from moe_core.cli._all_layers import explain_all
from moe_core.cli._output import emit
from moe_core.cli._select import select
from moe_core.errors import ConfigError

if TYPE_CHECKING:
    from moe_core.memory import LayerMemory
    from moe_core.selection import SelectionReport


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit code."""
    _arguments.check_tokens(args.tokens)
    if args.all_layers:
        return explain_all(args)
    found: dict[str, Any] = {}
    if args.path is not None:
        from moe_core.checkpoint import Checkpoint

        if args.shape is not None or args.scheme is not None:
            raise ConfigError("the layer is one of a checkpoint folder, or described by --scheme and --shape, not both")
        source = _arguments.source_of(args, Checkpoint.open(args.path))
        scheme, config = source.scheme, source.config
        keys = source.weight_key, source.activation_key
        found = {
            "checkpoint": str(args.path),
            "layer": source.index,
            "prefix": source.prefix,
            "format": source.format.name,
            "notes": [source.assumed] if source.assumed is not None else [],
        }
    else:
        config, weight_key, activation_key = _arguments.request_of(args)
        scheme, keys = args.scheme, (weight_key, activation_key)
    report, memory = select(args, scheme, config, *keys)
    told = None if memory is None else vars(memory)
    emit(args.json, {**found, **report.as_dict(), "memory": told}, _text(found, report, memory, args.verbose))
    if report.chosen is None:
        complain("moe explain: no backend fits; the report says why")
    return 0 if report.chosen is not None else 2


def _text(found: dict[str, Any], report: SelectionReport, memory: LayerMemory | None, verbose: bool) -> str:
    lines = []
    if found:
        lines.append(f"{found['checkpoint']}: layer {found['layer']} ({found['prefix']}), {found['format']}")
    if verbose:
        lines.append(str(report))
    else:
        lines += [_report.verdict(report), *_report.layer(report), *_report.reasons(report)]
    if memory is not None:
        lines.append(_report.memory(report, memory))
    lines += [f"note: {note}" for note in found.get("notes", ())]
    if not verbose:
        lines.append("-v: every backend with every reason")
    return "\n".join(lines)
