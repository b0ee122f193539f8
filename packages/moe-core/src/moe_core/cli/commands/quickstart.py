"""``moe quickstart``: write a small checkpoint, load it, explain, run and check it.

The checkpoint has the real format of the scheme's models, with random weights. The result is compared with a float64
reference of the same weights. The exit code is 1 if it is outside the derived tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_core.cli import _arguments, _report
from moe_core.cli._output import bytes_text, duration, emit, progress, seconds_since, written_folder
from moe_core.errors import ConfigError, RegistryError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moe_core.checkpoint import Checkpoint, LayerSource
    from moe_core.cli._check import Check
    from moe_core.layer.layer import FusedMoELayer
    from moe_core.plugins.scheme import SchemeSpec


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code.
    """
    import torch

    from moe_core.checkpoint import Checkpoint, read_layer

    started = time.perf_counter()
    scheme = _scheme(args.scheme)
    device = _arguments.device_of(args.device)
    with _folder(args.keep) as folder:
        if scheme.quickstart is None:
            raise RegistryError(f"scheme {scheme.name} writes no quickstart checkpoint")
        with progress("writing a checkpoint"), written_folder(folder):
            scheme.write_quickstart(folder)
        checkpoint = Checkpoint.open(folder)
        source = read_layer(checkpoint)
        with progress("running the layer and its reference"), torch.inference_mode():
            outcome = _compare(checkpoint, source, device, args)
        data = _summary(folder, source, outcome, args.keep is not None)
    data["seconds"] = seconds_since(started)
    emit(args.json, data, _text(data, outcome, args.verbose))
    return 0 if data["passed"] else 1


def _scheme(name: str | None) -> SchemeSpec:
    from moe_core.selection.registry import KNOWN_SCHEMES, install_hint, registry

    plugins = registry()
    if name is not None:
        return plugins.scheme(name)
    # Schemes of this project come first, in their own order.
    order = [*KNOWN_SCHEMES, *(name for name in plugins.scheme_names() if name not in KNOWN_SCHEMES)]
    for scheme in sorted(plugins.schemes(), key=lambda scheme: order.index(scheme.name)):
        if scheme.quickstart is not None:
            return scheme
    raise RegistryError(f"no scheme is installed that has a quickstart; add one: {install_hint('fp8')}")


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="moe-quickstart-") as name:
            yield Path(name)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ConfigError(f"--keep {keep}: expected a new or an empty folder")
    yield keep


@dataclass(frozen=True, eq=False)
class _Outcome:
    layer: FusedMoELayer
    tokens: int
    check: Check
    seconds_load: float
    seconds_run: float


def _compare(checkpoint: Checkpoint, source: LayerSource, device: torch.device, args: argparse.Namespace) -> _Outcome:
    import torch

    from moe_core.cli._check import check_output
    from moe_core.layer.loading import load_layer

    start = time.perf_counter()
    layer = load_layer(checkpoint, layer=source.index, device=device, backend=args.backend)
    seconds_load = seconds_since(start)

    generator = torch.Generator().manual_seed(0)
    _arguments.check_room(args.tokens, source.config.hidden_size)
    x = torch.randn(args.tokens, source.config.hidden_size, generator=generator).to(source.config.dtype)
    there = x.to(device)
    topk_weights, topk_ids = layer.route(layer.router_logits(there))

    def once() -> Tensor:
        result: Tensor = layer(there, topk_weights=topk_weights, topk_ids=topk_ids)
        return result.cpu()

    once()  # The first call compiles kernels.
    start = time.perf_counter()
    output = once()
    seconds_run = seconds_since(start)
    whole = [(source.config, source.weights(), None)]
    check = check_output(layer, whole, x, output, topk_weights=topk_weights.cpu(), topk_ids=topk_ids.cpu())
    return _Outcome(layer, args.tokens, check, seconds_load, seconds_run)


def _summary(folder: Path, source: LayerSource, outcome: _Outcome, kept: bool) -> dict[str, Any]:
    files = sorted(folder.iterdir())
    return {
        "checkpoint": str(folder) if kept else None,
        "files": [path.name for path in files],
        "bytes": sum(path.stat().st_size for path in files),
        "layer": source.index,
        "prefix": source.prefix,
        "scheme": source.scheme,
        "format": source.format.name,
        "backend": outcome.layer.selection.backend,
        "tokens": outcome.tokens,
        **outcome.check.as_dict(),
        "seconds_load": outcome.seconds_load,
        "seconds_run": outcome.seconds_run,
        "selection": outcome.layer.selection.report.as_dict(),
    }


def _text(data: dict[str, Any], outcome: _Outcome, verbose: bool) -> str:
    where = data["checkpoint"] or "a temporary folder"
    found = outcome.layer.selection.report
    brief = [_report.verdict(found), *_report.layer(found), *_report.reasons(found)]
    report = "\n".join(f"   {line}" for line in (str(found).splitlines() if verbose else brief))
    lines = [
        f"1. wrote a checkpoint into {where}: {', '.join(data['files'])} ({bytes_text(data['bytes'])})",
        f"2. read layer {data['layer']} ({data['prefix']}): {data['format']}",
        "3. chose a backend",
        report,
        (
            f"4. loaded and converted the weights in {duration(data['seconds_load'])}, "
            f"ran {data['tokens']} tokens in {duration(data['seconds_run'])}"
        ),
        f"5. compared with the float64 reference: {outcome.check}",
    ]
    if data["fault"]:
        lines.append(f"   {data['fault']}")
    lines += ["", f"{'OK' if data['passed'] else 'FAILED'} in {duration(data['seconds'])}"]
    if data["passed"]:
        folder = shlex.quote(data["checkpoint"] or "DIR")
        lines.append(f"next: moe run {folder}, moe explain {folder} --device h200, moe backends, moe doctor")
        if not data["checkpoint"]:
            lines.append("DIR: a checkpoint of yours, or what moe quickstart --keep DIR writes")
    return "\n".join(lines)
