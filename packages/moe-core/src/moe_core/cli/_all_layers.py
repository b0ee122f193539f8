"""``moe explain --all-layers``: backend of each MoE layer of a checkpoint, and total memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moe_core.checkpoint.experts.find_layer import ranges
from moe_core.cli import _arguments, _report
from moe_core.cli._fit import Figures, refusal
from moe_core.cli._output import bytes_text, emit, progress, table
from moe_core.cli._select import select
from moe_core.cli.terminal.console import complain
from moe_core.errors import MoEError

if TYPE_CHECKING:
    from moe_core.checkpoint import Checkpoint, LayerSource
    from moe_core.selection.memory import LayerMemory
    from moe_core.selection.report import SelectionReport


@dataclass(frozen=True)
class _Layer:
    """One layer: its selection, or the reason why it cannot be read."""

    index: int
    format: str = ""
    report: SelectionReport | None = None
    memory: LayerMemory | None = None
    fault: str = ""
    assumed: str | None = None
    stored: int = 0

    @property
    def kind(self) -> tuple[Any, ...]:
        """Properties shared by layers that are shown in one row."""
        if self.report is None:
            # Layers with the same defect differ only in the layer number of their tensors.
            return (self.fault.replace(f".{self.index}.", ".*."),)
        report = self.report
        config = replace(report.config, routing=None)
        return (report.scheme, self.format, config, report.weight_key, report.activation_key, report.chosen)


def explain_all(args: argparse.Namespace) -> int:
    """Run ``moe explain --all-layers``.

    Args:
        args: Parsed arguments.

    Returns:
        Exit code: 2 if a layer cannot be read or no backend fits it, 1 if the model does not fit the card, else 0.
    """
    checkpoint, notes = _arguments.opened(args)
    indices = checkpoint.moe_layers
    if not indices:
        _arguments.source_of(args, checkpoint)  # This raises an error that states what the checkpoint holds instead.
    with progress(f"reading the names of {len(indices)} layers"):
        layers = list(_explained(args, checkpoint, indices))
    failed = [layer for layer in layers if layer.report is None or layer.report.chosen is None]
    known = [(layer.report, layer.memory) for layer in layers if layer.report is not None and layer.memory is not None]
    stored = sum(layer.stored for layer in layers)
    figures = Figures.of(known, checkpoint, stored, _arguments.parallel_of(args))
    emit(
        args.json,
        {**_data(args, layers), **figures.as_dict(), "notes": notes, "estimated": bool(notes)},
        "\n".join([_text(args, layers, figures), *(f"note: {note}" for note in notes)]),
    )
    if failed:
        complain(f"moe explain: {len(failed)} of {len(layers)} layers can't be run")
        return 2
    if figures.fit is not None and not figures.fit.fits:
        complain(refusal(figures.fit, str(known[0][0].device)))
        return 1
    return 0


def _explained(args: argparse.Namespace, checkpoint: Checkpoint, indices: Sequence[int]) -> Iterator[_Layer]:
    known: dict[Any, tuple[SelectionReport, LayerMemory | None]] = {}
    parallel = _arguments.parallel_of(args)
    for index in indices:
        try:
            source: LayerSource = _arguments.source_of(args, checkpoint, index, parallel=parallel)
            source.check_fits()
        except MoEError as error:
            yield _Layer(index, fault=str(error) if args.verbose else error.message)
            continue
        request = source.scheme, source.config, source.weight_key, source.activation_key
        if request not in known:
            known[request] = select(args, *request)
        report, memory = known[request]
        yield _Layer(index, source.format.name, report, memory, assumed=source.assumed, stored=source.layer.nbytes)


def _totals(layers: list[_Layer]) -> dict[str, int]:
    """Bytes of all layers on one device.

    They are the weights of all layers, the weights of the largest layer, the peak while the last layer is loaded, and
    the workspace that the layers share.
    """
    known = [layer.memory for layer in layers if layer.memory is not None]
    weights = sum(memory.weights for memory in known)
    return {
        "weights": weights,
        "largest_layer": max((memory.weights for memory in known), default=0),
        "load_peak": max((weights - memory.weights + memory.load_peak for memory in known), default=0),
        "workspace": max((memory.workspace or 0 for memory in known), default=0),
    }


def _data(args: argparse.Namespace, layers: list[_Layer]) -> dict[str, Any]:
    return {
        "checkpoint": str(args.path),
        "layers": [
            {
                "layer": layer.index,
                "format": layer.format or None,
                "selection": None if layer.report is None else layer.report.as_dict(),
                "memory": None if layer.memory is None else vars(layer.memory),
                "fault": layer.fault or None,
                "notes": [] if layer.assumed is None else [layer.assumed],
            }
            for layer in layers
        ],
        "total": _totals(layers),
    }


def _text(args: argparse.Namespace, layers: list[_Layer], figures: Figures) -> str:
    by_kind: dict[Any, list[_Layer]] = {}
    for layer in layers:
        by_kind.setdefault(layer.kind, []).append(layer)
    groups = list(by_kind.values())
    rows = []
    for group in groups:
        first, count, indices = group[0], len(group), _indices(group)
        if first.report is None:
            rows.append([indices, "not read", "", "", ""])
            continue
        each = "" if first.memory is None else bytes_text(first.memory.weights)
        all_of_them = "" if first.memory is None else bytes_text(count * first.memory.weights)
        chosen = "none" if first.report.chosen is None else first.report.chosen.backend
        rows.append([indices, first.report.scheme, chosen, each, all_of_them])
    total = _totals(layers)
    lines = [
        f"{args.path}: {len(layers)} MoE layer{'s' * (len(layers) > 1)}",
        table(["layers", "scheme", "backend", "each", "weights"], rows),
    ]
    for group in groups:
        lines += ["", *_about(group, args.verbose)]
    lines += [
        "",
        (
            f"total: weights {bytes_text(total['weights'])}, up to {bytes_text(total['load_peak'])} at load; "
            f"workspace {bytes_text(total['workspace'])} for {args.tokens} tokens if the layers share it; "
            f"largest layer {bytes_text(total['largest_layer'])}"
        ),
    ]
    lines += figures.lines()
    lines += [f"note: {note}" for note in dict.fromkeys(layer.assumed for layer in layers) if note is not None]
    return "\n".join(lines)


def _indices(group: list[_Layer]) -> str:
    text = ranges(layer.index for layer in group)
    return text if len(text) <= 24 else f"{text[:20].rpartition(',')[0]} … ({len(group)})"


def _about(group: list[_Layer], verbose: bool) -> list[str]:
    """Lines about a group of similar layers."""
    first = group[0]
    head = f"layer{'s' * (len(group) > 1)} {_indices(group)}"
    if first.report is None:
        return [f"{head}: {first.fault}"]
    if verbose:
        return [f"{head}, {first.format}", str(first.report), *_report.note(first.report)]
    report = first.report
    about = [*_report.layer(report), *_report.reasons(report), *_report.note(report)]
    return [f"{head}, {first.format}: {_report.verdict(report)}", *about]
