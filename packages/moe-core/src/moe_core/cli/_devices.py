"""``moe explain --device A,B``: one line per device with the backend that would run a layer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_core.cli import _report
from moe_core.cli._fit import refusal
from moe_core.cli._output import bytes_text, duration, emit, table
from moe_core.cli._prepare_finalize import sizes
from moe_core.cli.terminal.console import complain

if TYPE_CHECKING:
    from moe_core.cli._fit import Fit
    from moe_core.cli._prepare_finalize import PrepareFinalizeSelection
    from moe_core.selection.memory import LayerMemory
    from moe_core.selection.report import SelectionReport

_HEADER = ("device", "backend", "kernel", "tested there", "weights", "workspace", "needs", "fits")
#: additional columns for a layer over several ranks
_OVER_RANKS = ("prepare/finalize", "total")


class Explained(NamedTuple):
    """Explanation for one device: JSON, text, and the figures of its table row."""

    data: dict[str, Any]
    text: str
    report: SelectionReport
    memory: LayerMemory | None
    fits: bool
    over_ranks: PrepareFinalizeSelection | None = None
    fit: Fit | None = None


def compare(args: argparse.Namespace, explain: Callable[[argparse.Namespace], Explained]) -> int:
    """Print one line per device.

    Args:
        args: Parsed arguments.
        explain: Explains the layer for the arguments of one device.

    Returns:
        Exit code: 2 if nothing fits on one of the devices, 1 if the model does not fit a card, else 0.
    """
    names = args.devices
    found = [explain(argparse.Namespace(**{**vars(args), "device": name})) for name in names]
    rows = [(*_row(name, one), *_travel(one)) for name, one in zip(names, found, strict=True)]
    over_ranks = found[0].over_ranks
    header, spread = (_HEADER, []) if over_ranks is None else ((*_HEADER, *_OVER_RANKS), [sizes(over_ranks)])
    lines = [*spread, *_report.layer(found[0].report), table(header, rows)]
    lines += [f"{name}: {text}" for name, one in zip(names, found, strict=True) for text in _said(one)]
    lines.append("--device with one of them: every reason")
    emit(args.json, {"devices": [one.data for one in found]}, "\n".join(lines))
    without = [name for name, one in zip(names, found, strict=True) if not one.fits]
    if without:
        complain(f"moe explain: nothing fits on {', '.join(without)}")
        return 2
    full = [(name, one.fit) for name, one in zip(names, found, strict=True) if one.fit is not None and not one.fit.fits]
    for name, fit in full:
        complain(refusal(fit, name))
    return 1 if full else 0


def _said(one: Explained) -> list[str]:
    """Lines with details that the table has no room for."""
    report, chosen = one.report, one.report.chosen
    helps = [f"what helps: {_report.helps(alternative)}" for alternative in report.alternatives[:1]]
    if chosen is None:
        return [*map(_report.line, report.closest[:1]), *helps]
    if report.fallback is not None:
        return [f"no GPU kernel fits; {chosen.backend} is a loop driven by the host", *helps]
    return [chosen.notes] if chosen.is_kernel and chosen.notes else []


def _travel(one: Explained) -> tuple[str, ...]:
    """How tokens travel and the time of a layer; empty for a single rank."""
    if one.over_ranks is None:
        return ()
    chosen = one.over_ranks.chosen
    seconds = None if chosen is None or chosen.cost is None else chosen.cost.seconds
    return "-" if chosen is None else chosen.name, "-" if seconds is None else duration(seconds)


def _row(name: str, one: Explained) -> tuple[str, ...]:
    chosen, memory, arch = one.report.chosen, one.memory, str(one.report.device)
    device = name if name == arch else f"{name} ({arch.partition('(')[2].rstrip(')') or arch})"
    if chosen is None:
        return device, "-", "-", "-", "-", "-", "-", "-"
    weights, workspace = "-", "-"
    if memory is not None:
        weights = bytes_text(memory.weights)
        workspace = "-" if memory.workspace is None else bytes_text(memory.workspace)
    tested = "yes" if chosen.is_tested_on(one.report.device) else "no"
    fits = ("-", "-") if one.fit is None else (bytes_text(one.fit.needed), "yes" if one.fit.fits else "no")
    return device, chosen.backend, chosen.experts.__name__, tested, weights, workspace, *fits
