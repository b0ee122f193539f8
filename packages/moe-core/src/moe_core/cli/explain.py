"""moe explain: which backend runs a layer, and why no other; also for a GPU that is not here.

The layer is one of a checkpoint folder, or described by --scheme and --shape.  Exit code 2 where no backend fits.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from moe_core.cli import _arguments
from moe_core.cli._output import emit
from moe_core.selection import SelectionError


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit code."""
    from moe_core.registry import registry

    found: dict[str, Any] = {}
    if args.path is not None:
        from moe_core.checkpoint import Checkpoint

        source = _arguments.source_of(args, Checkpoint.open(args.path))
        scheme, config = source.scheme, source.config
        weight_key, activation_key = source.weight_key, source.activation_key
        found = {
            "checkpoint": str(args.path),
            "layer": source.index,
            "prefix": source.prefix,
            "format": source.format.name,
            "notes": [source.assumed] if source.assumed is not None else [],
        }
    else:
        config, weight_key, activation_key = _arguments.request_of(args)
        scheme = args.scheme
    oracle = registry().oracle(scheme)
    try:
        selection = oracle.select(
            config,
            weight_key=weight_key,
            activation_key=activation_key,
            moe_backend=args.backend,
            device=args.device,
        )
        report, code = selection.report, 0
    except SelectionError as error:
        # the reasons are what was asked for
        report, code = error.report, 2
    head = f"{found['checkpoint']}: layer {found['layer']} ({found['prefix']}), {found['format']}\n" if found else ""
    notes = "".join(f"\nnote: {note}" for note in found.get("notes", ()))
    emit(args.json, {**found, **report.as_dict()}, f"{head}{report}{notes}")
    if code:
        print("moe explain: no backend fits; the report says why", file=sys.stderr)
    return code
