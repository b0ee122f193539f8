"""moe doctor: versions, GPU, installed schemes, what is missing and the command that adds it."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from typing import TYPE_CHECKING, Any

from moe_core.cli._output import bytes_text, emit

if TYPE_CHECKING:
    from moe_core.registry import Registry

PACKAGES = ("moe-core", "torch", "triton", "safetensors", "numpy", "flashinfer-python", "matplotlib")


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit code: 1 where something installed does not work."""
    from moe_core.registry import KNOWN_SCHEMES, registry

    plugins = registry()
    schemes, faults = _schemes(plugins)
    versions = {name: _version(name) for name in (*PACKAGES, *KNOWN_SCHEMES.values())}
    data = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "versions": versions,
        "devices": _devices(),
        "schemes": schemes,
        "missing": _missing(versions, plugins),
        "faults": faults,
    }
    emit(args.json, data, _text(data))
    return 1 if faults else 0


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    import torch

    from moe_core.device import DeviceInfo

    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())] + ["cpu"]
    found = []
    for name in names:
        info = DeviceInfo.current(name)
        found.append(
            {
                "device": name,
                "arch": info.arch,
                "name": info.name if name != "cpu" else platform.processor() or platform.machine(),
                "memory": info.memory,
                "multiprocessors": info.multiprocessors,
                "fp8": info.supports_fp8,
            }
        )
    return found


def _schemes(plugins: Registry) -> tuple[list[dict[str, Any]], list[str]]:
    """Installed schemes with their backends' names, and what can't be loaded."""
    from moe_core.errors import MoEError

    found: list[dict[str, Any]] = []
    faults: list[str] = []
    try:
        names = plugins.scheme_names()
    except MoEError as error:
        return found, [str(error)]
    for name in names:
        try:
            backends = [backend.name for backend in plugins.oracle(name).table() if backend.load()]
            formats = [adapter.name for adapter in plugins.formats(name)]
        except (MoEError, ImportError, AttributeError) as error:
            faults.append(f"scheme {name}: {error}")
            continue
        found.append({"scheme": name, "backends": backends, "formats": formats})
    return found, faults


def _missing(versions: dict[str, str | None], plugins: Registry) -> list[dict[str, str]]:
    import torch

    from moe_core.environment import TRITON, Environment
    from moe_core.errors import MoEError
    from moe_core.install import pip_command
    from moe_core.registry import KNOWN_SCHEMES

    missing = []

    def add(what: str, why: str, command: str) -> None:
        missing.append({"what": what, "why": why, "command": command})

    try:
        installed = plugins.scheme_names()
    except MoEError:
        installed = ()
    for scheme, package in KNOWN_SCHEMES.items():
        if versions[package] is None:
            add(package, f"reads and runs {scheme} checkpoints", pip_command(package))
        elif scheme not in installed:
            why = f"{versions[package]} is installed, but brings no kernels yet; a newer one may"
            add(package, why, pip_command(package, upgrade=True))
    environment = Environment.current()
    wanted = {TRITON}
    for name in installed:
        try:
            wanted |= {r for b in plugins.oracle(name).table() for e in b.load() for r in e.claims.requires}
        except (MoEError, ImportError, AttributeError):
            continue
    for requirement in sorted(wanted, key=lambda r: r.distribution):
        reason = environment.reason_against(requirement)
        if reason is not None:
            add(requirement.distribution, reason.partition(" (")[0], requirement.hint)
    if versions["matplotlib"] is None:
        add("matplotlib", "draws the picture of moe bench --plot", "pip install matplotlib")
    if not torch.cuda.is_available():
        why = "torch sees none: kernels for GPUs won't run here"
        if torch.version.cuda is None and torch.version.hip is None:
            why = "this torch was built without GPU support"
        add("a GPU", why, "nvidia-smi (or rocm-smi) shows what the driver sees")
    return missing


def _text(data: dict[str, Any]) -> str:
    lines = [f"python {data['python']} ({data['executable']}), {data['platform']}", "", "packages"]
    lines += [f"  {name:<18} {version or '-'}" for name, version in data["versions"].items()]
    lines += ["", "devices"]
    for device in data["devices"]:
        memory = f", {bytes_text(device['memory'])}" if device["memory"] else ""
        fp8 = ", fp8 matrix units" if device["fp8"] else ""
        lines.append(f"  {device['device']:<18} {device['name']} ({device['arch']}{memory}{fp8})")
    lines += ["", "schemes"]
    lines += [f"  {s['scheme']:<18} backends: {', '.join(s['backends'])}" for s in data["schemes"]] or ["  none"]
    if data["missing"]:
        lines += ["", "missing"]
        lines += [f"  {m['what']:<18} {m['why']}\n{'':<21}{m['command']}" for m in data["missing"]]
    if data["faults"]:
        lines += ["", "faults", *(f"  {fault}" for fault in data["faults"])]
    return "\n".join(lines)
