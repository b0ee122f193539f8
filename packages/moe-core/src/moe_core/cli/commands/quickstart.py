"""``moe quickstart``: write a small checkpoint, then load, explain, run and check it as ``moe run --check`` does.

The checkpoint has the real format of the scheme's models, with random weights. The exit code is 1 if the output is
outside the derived tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_core.cli import _arguments, _report
from moe_core.cli._output import bytes_text, duration, emit, progress, seconds_since, written_folder
from moe_core.cli.commands.run import Outcome, run_layer, summary
from moe_core.cli.grammar import parse
from moe_core.errors import ConfigError, RegistryError

if TYPE_CHECKING:
    from moe_core.plugins.scheme import SchemeSpec


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code.
    """
    started = time.perf_counter()
    scheme = _scheme(args.scheme)
    if scheme.quickstart is None:
        raise RegistryError(f"scheme {scheme.name} writes no quickstart checkpoint")
    _arguments.device_of(args.device)  # Refuse an unknown device before anything is written.
    device = [] if args.device is None else [f"--device={args.device}"]
    with _folder(args.keep) as folder:
        with progress("writing a checkpoint"), written_folder(folder):
            scheme.write_quickstart(folder)
        command = ["run", f"--tokens={args.tokens}", f"--backend={args.backend}", *device, "--check", "--", str(folder)]
        asked = parse(command)
        # The first call compiles kernels.
        outcome = run_layer(asked, calls=2)
        ran, files = summary(asked, outcome), sorted(folder.iterdir())
        same = ("layer", "prefix", "scheme", "format", "backend", "tokens", "seconds_load", "seconds_run", "selection")
        data = {
            "checkpoint": None if args.keep is None else str(folder),
            "files": [path.name for path in files],
            "bytes": sum(path.stat().st_size for path in files),
            **{name: ran[name] for name in same},
            **ran["check"],
        }
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


def _text(data: dict[str, Any], outcome: Outcome, verbose: bool) -> str:
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
