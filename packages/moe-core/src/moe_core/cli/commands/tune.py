"""``moe tune``: time launch configurations of layers on this machine's GPU.

The layers come from a checkpoint, or a layer is described by options.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_core._support.atomic_write import check_writable, write_whole, writing
from moe_core.cli import _arguments
from moe_core.cli._layers import Layer, kinds_of_layers
from moe_core.cli._output import check_spares, emit, locked, progress, table
from moe_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from moe_core.kernels.tuning.limits import Plan
    from moe_core.kernels.tuning.profile import TunedLayer, TuningProfile
    from moe_core.kernels.tuning.search import Rig
    from moe_core.selection.report import Selection
    from moe_core.spec.device import DeviceInfo


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code.
    """
    import torch

    counts = args.tokens
    device, gpu = _gpu(args.device)
    path = _path(args, gpu)
    # Refuse a file that cannot be replaced before anything is measured.
    _, note = _profile(path, gpu)
    layers = [(layer, _selection(layer, gpu, args.backend)) for layer in kinds_of_layers(args, device)]
    found: list[tuple[Layer, Selection, TunedLayer, dict[int, Plan]]] = []
    for layer, selection in layers:
        with torch.inference_mode(), progress(f"{layer.what}: loading the weights") as tell:
            tuned, defaults = _tuned(layer, selection, device, counts, args.budget, tell)
        found.append((layer, selection, tuned, defaults))
        # Save after each layer, since the next one may be interrupted.
        _add(path, gpu, [tuned for _, _, tuned, _ in found])
    data = {
        "file": str(path),
        "note": note,
        "device": gpu.arch,
        "device_name": gpu.name,
        "layers": [
            {
                "layer": layer.what,
                "backend": selection.backend,
                "experts": selection.experts.__name__,
                "scheme": tuned.scheme,
                "weight_key": tuned.weight_key,
                "activation_key": tuned.activation_key,
                "ranges": [
                    {
                        "first": one.first,
                        "last": one.last,
                        "default_us": one.default_us,
                        "best_us": one.best_us,
                        "changes": changes(defaults[one.last], one.plan),
                    }
                    for one in tuned.ranges
                ],
            }
            for layer, selection, tuned, defaults in found
        ],
    }
    emit(args.json, data, _text(data, own=args.output is None))
    return 0


def _gpu(name: str | None) -> tuple[torch.device, DeviceInfo]:
    from moe_core.spec.device import DeviceInfo

    device = _arguments.device_of(name)
    if device.type != "cuda":
        raise ConfigError(
            f"there is nothing to tune on {device.type}: launch configurations are those of kernels on a GPU"
            + ("; torch sees none here" if name is None else "")
        )
    return device, DeviceInfo.current(device)


def _path(args: argparse.Namespace, gpu: DeviceInfo) -> Path:
    """Return the path of the profile; the user's own folder is created."""
    from moe_core.kernels.tuning.places import user_path

    own = user_path(gpu.name) if args.output is None else None
    path: Path | None = own or args.output
    if path is None:
        raise ConfigError(f"no home folder for a profile of {gpu.name}; give --output FILE")
    if own is not None:
        with writing(own):
            own.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path)
    check_spares(path, args.path)
    return path


def _profile(path: Path, gpu: DeviceInfo) -> tuple[TuningProfile, str]:
    """Return (the profile whose other layers are kept, a note about it)."""
    from moe_core.kernels.tuning.profile import TuningProfile

    empty = TuningProfile.of_this_machine(gpu)
    if not path.exists():
        return empty, ""
    try:
        before = TuningProfile.read(path)
    except ConfigError as error:
        raise ConfigError(f"{error.message}; it is not replaced: move it away, or give another --output") from None
    reason = before.reason_against(gpu)
    if reason is None:
        return before, ""
    if (before.gpu, before.arch) != (gpu.name, gpu.arch):
        raise ConfigError(f"{path} is not replaced: {reason}; give another --output")
    return empty, f"the earlier content is dropped: {reason.partition(':')[0]}"


def _add(path: Path, gpu: DeviceInfo, layers: Sequence[TunedLayer]) -> None:
    """Add ``layers`` to the profile; another run may have added layers since it was read."""
    with locked(path):
        profile, _ = _profile(path, gpu)
        for layer in layers:
            profile = profile.with_layer(layer)
        write_whole(path, profile.to_json().encode())


def _selection(layer: Layer, gpu: DeviceInfo, backend: str) -> Selection:
    from moe_core.kernels.experts.grouped import GroupedExperts

    selection = layer.select(backend, gpu, "none")
    if not issubclass(selection.experts, GroupedExperts):
        fitting = dict.fromkeys(
            c.backend for c in selection.report.candidates if c.fits and issubclass(c.experts, GroupedExperts)
        )
        instead = f"; --backend {' or '.join(fitting)} has some" if fitting else ""
        raise ConfigError(
            f"{layer.what}: {selection.experts.__name__} selects its launches itself: there is nothing to tune{instead}"
        )
    return selection


def rig_of(
    layer: Layer, selection: Selection, device: torch.device, most: int
) -> contextlib.AbstractContextManager[Rig]:
    """Make the rig that times a layer.

    Args:
        layer: The layer.
        selection: Selected backend.
        device: The GPU.
        most: Largest number of tokens.

    Returns:
        Context manager of the rig.
    """
    from moe_core.cli._tuning_rig import LayerOnGpu

    return LayerOnGpu(layer, selection, device, most)


def _tuned(
    layer: Layer, selection: Selection, device: torch.device, counts: list[int], budget: float, tell: Any
) -> tuple[TunedLayer, dict[int, Plan]]:
    """Return the result for ``layer`` and the built-in plans."""
    from moe_core.kernels.tuning.choice import name_of
    from moe_core.kernels.tuning.profile import TunedLayer
    from moe_core.kernels.tuning.search import search
    from moe_core.selection.oracle import Oracle

    problem = Oracle.make_experts(selection).problem  # type: ignore[attr-defined]

    def show_progress(text: str, part: float) -> None:
        tell(f"{layer.what}: {text}", part)

    with rig_of(layer, selection, device, max(counts)) as rig:
        ranges = search(problem, counts, rig, seconds=budget, clock=time.perf_counter, progress=show_progress)
        defaults = {one.last: rig.default(one.last) for one in ranges}
    keys = name_of(layer.weight_key), name_of(layer.activation_key)
    return TunedLayer(layer.scheme, *keys, problem, ranges), defaults


def changes(default: Plan, plan: Plan) -> list[str]:
    """List the changes from the built-in plan, such as "gemm1.num_stages 4 -> 3".

    Args:
        default: The built-in plan.
        plan: The other plan.

    Returns:
        The changes.
    """
    if type(plan) is not type(default):
        return [f"{type(default).__name__} -> {type(plan).__name__}"]
    found = []
    for part in ("gemm1", "gemm2"):
        one, two = getattr(default, part), getattr(plan, part)
        found += [(f"{part}.{f.name}", getattr(one, f.name), getattr(two, f.name)) for f in fields(one)]
    rest = [f.name for f in fields(default) if f.name not in ("gemm1", "gemm2")]
    found += [(name, getattr(default, name), getattr(plan, name)) for name in rest]
    return [f"{name} {before} -> {after}" for name, before, after in found if before != after]


def _text(data: dict[str, Any], own: bool) -> str:
    lines = []
    for layer in data["layers"]:
        rows = []
        for one in layer["ranges"]:
            span = f"{one['first']}-{one['last']}" if one["first"] < one["last"] else str(one["last"])
            times = [f"{one[name]:.1f} µs" for name in ("default_us", "best_us")]
            saved = 1 - one["best_us"] / one["default_us"] if one["default_us"] else 0.0
            rows.append([span, *times, f"{100 * saved:.0f} %", ", ".join(one["changes"]) or "built-in"])
        what = f"{layer['scheme']}, {layer['layer']}, on {data['device_name']} ({data['device']})"
        lines += [
            f"{what}: {layer['backend']} [{layer['experts']}]",
            table(["tokens", "built-in", "best", "saved", "changes"], rows),
            "",
        ]
    lines += [f"note: {data['note']}"] if data["note"] else []
    how = "selection finds it" if own else f"MOE_TUNING={data['file']} uses it, or tuning= of select"
    return "\n".join([*lines, f"written to {data['file']}: {how}"])
