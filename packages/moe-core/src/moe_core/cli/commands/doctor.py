"""``moe doctor``: versions, GPUs, schemes, missing packages and commands to add them."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moe_core.cli import installed
from moe_core.cli._output import bytes_text, emit

if TYPE_CHECKING:
    from moe_core.plugins.faults import PluginFault
    from moe_core.selection.oracle import Oracle
    from moe_core.selection.registry import Registry
    from moe_core.spec.environment import Requirement

PACKAGES = ("moe-core", "torch", "triton", "safetensors", "numpy", "flashinfer-python")

#: packages that are shown only if they are installed
FRAMEWORKS = ("transformers", "vllm", "sglang")

#: entry points of packages that integrate the experts into other programs; each is a function that returns lines of
#: text
INTEGRATION_GROUP = "moe_core.integrations"


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code: 1 if something installed does not work.
    """
    from moe_core.selection.registry import KNOWN_SCHEMES, registry
    from moe_core.spec.environment import distribution_version

    plugins = registry()
    schemes, faults, notes = _schemes(plugins)
    integrations = _integrations(faults)
    there = (name for name in (*_plugin_distributions(), *FRAMEWORKS) if distribution_version(name) is not None)
    versions = {name: distribution_version(name) for name in (*PACKAGES, *KNOWN_SCHEMES.values(), *there)}
    data = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "versions": versions,
        "devices": _devices(),
        "schemes": schemes,
        "integrations": integrations,
        "missing": _missing(versions, plugins),
        "faults": faults,
        "notes": notes,
    }
    emit(args.json, data, _text(data))
    return 1 if faults else 0


def _plugin_distributions() -> list[str]:
    """Return the installed distributions that extend moe-core, also by commands or integrations."""
    from moe_core.plugins import entry_points
    from moe_core.plugins.faults import PluginFault
    from moe_core.selection.registry import BACKEND_GROUP, FORMAT_GROUP, SCHEME_GROUP

    groups = (SCHEME_GROUP, BACKEND_GROUP, FORMAT_GROUP, INTEGRATION_GROUP, installed.GROUP)
    points = [point for group in groups for point in entry_points.installed(group)]
    return sorted({entry_points.owner(p).partition(" ")[0] for p in points if not isinstance(p, PluginFault)})


def _devices() -> list[dict[str, Any]]:
    import torch

    from moe_core.spec.device import DeviceInfo

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


def _schemes(plugins: Registry) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Return the installed schemes with their backends, what was omitted, and notes on plug-ins."""
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    broken: list[PluginFault] = []
    for oracle in plugins.oracles():
        backends = [backend.name for backend in oracle.table() if backend.load()]
        formats = [adapter.name for adapter in plugins.formats(oracle.scheme)]
        found.append({"scheme": oracle.scheme, "backends": backends, "formats": formats})
        notes += oracle.notes()
        broken += _broken_claims(oracle)
    plugins.online_names()
    faults = [*map(str, dict.fromkeys((*plugins.faults(), *broken))), *map(str, installed.faults())]
    return found, faults, notes


def _integrations(faults: list[str]) -> dict[str, list[str]]:
    """Return the lines that integrations report, by the names of their entry points.

    Each entry point is a function without arguments that returns lines of text. Errors that it raises are added to
    ``faults``.
    """
    from moe_core.plugins.entry_points import installed, load
    from moe_core.plugins.faults import PluginFault

    found: dict[str, list[str]] = {}
    for point in installed(INTEGRATION_GROUP):
        if isinstance(point, PluginFault):  # The registry has already named this fault.
            continue
        says = load(point, "integration", _called)
        if isinstance(says, PluginFault):
            faults.append(str(says))
        else:
            found[point.name] = says
    return dict(sorted(found.items()))


def _called(function: Any) -> list[str]:
    return [str(line) for line in function()]


def _broken_claims(oracle: Oracle) -> Iterator[PluginFault]:
    """Yield classes whose claims fail for a small layer of any claimed pair of keys."""
    from moe_core.errors import MoEError
    from moe_core.interface.claims import expand_key
    from moe_core.selection.report import SelectionError
    from moe_core.spec.config import FusedMoEConfig

    config = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=256, intermediate_size=256)
    claims = [experts.claims for backend in oracle.table() for experts in backend.load()]
    pairs = dict.fromkeys((expand_key(w)[0], expand_key(a)[0]) for claim in claims for w, a in claim.keys)
    for weight_key, activation_key in pairs:
        try:
            report = oracle.select(config, weight_key=weight_key, activation_key=activation_key).report
        except SelectionError as error:
            report = error.report
        except MoEError:  # The scheme does not support these keys.
            continue
        yield from (candidate.fault for candidate in report.candidates if candidate.fault is not None)


def _missing(versions: dict[str, str | None], plugins: Registry) -> list[dict[str, str]]:
    import torch

    from moe_core.plugins.install import pip_command
    from moe_core.selection.registry import KNOWN_SCHEMES
    from moe_core.spec.environment import TRITON, Environment, pip_requirements

    missing = []

    def add(what: str, why: str, command: str) -> None:
        missing.append({"what": what, "why": why, "command": command})

    schemes = plugins.scheme_names()
    for scheme, package in KNOWN_SCHEMES.items():
        if versions[package] is None:
            add(package, f"reads and runs {scheme} checkpoints", pip_command(package))
        elif scheme not in schemes:
            why = f"{versions[package]} is installed, but brings no kernels yet; a newer one may"
            add(package, why, pip_command(package, upgrade=True))
    for package in dict.fromkeys(installed.KNOWN.values()):
        if package not in versions:
            commands = " and ".join(f"moe {name}" for name, origin in installed.KNOWN.items() if origin == package)
            add(package, f"brings {commands}", pip_command(package))
    environment = Environment.current()
    wanted = {TRITON}
    for oracle in plugins.oracles():
        wanted |= {r for b in oracle.table() for e in b.load() for r in e.claims.requires}
    # Several schemes may need the same library, each with a separate extra that adds it.
    lacking: dict[str, list[Requirement]] = {}
    for requirement in sorted(wanted, key=lambda r: (r.distribution, r.to_install)):
        if environment.reason_against(requirement) is not None:
            lacking.setdefault(requirement.distribution, []).append(requirement)
    for distribution, requirements in lacking.items():
        reasons = dict.fromkeys(str(environment.reason_against(r)).partition(" (")[0] for r in requirements)
        add(distribution, "; ".join(reasons), pip_requirements(requirements))
    if not torch.cuda.is_available():
        why = "torch sees none: kernels for GPUs won't run here"
        if torch.version.cuda is None and torch.version.hip is None:
            why = "this torch was built without GPU support"
        add("a GPU", why, "nvidia-smi (or rocm-smi) shows what the driver sees")
    return missing


def _text(data: dict[str, Any]) -> str:
    width = max(18, *map(len, data["versions"]))
    lines = [f"python {data['python']} ({data['executable']}), {data['platform']}", "", "packages"]
    lines += [f"  {name:<{width}} {version or '-'}" for name, version in data["versions"].items()]
    lines += ["", "devices"]
    for device in data["devices"]:
        memory = f", {bytes_text(device['memory'])}" if device["memory"] else ""
        fp8 = ", fp8 tensor cores" if device["fp8"] else ""
        lines.append(f"  {device['device']:<{width}} {device['name']} ({device['arch']}{memory}{fp8})")
    lines += ["", "schemes"]
    lines += [f"  {s['scheme']:<{width}} backends: {', '.join(s['backends'])}" for s in data["schemes"]] or ["  none"]
    if data["integrations"]:
        lines += ["", "integrations"]
        lines += [
            f"  {name if not i else '':<{width}} {line}"
            for name, says in data["integrations"].items()
            for i, line in enumerate(says)
        ]
    if data["missing"]:
        lines += ["", "missing"]
        lines += [f"  {m['what']:<{width}} {m['why']}\n{'':<{width + 3}}{m['command']}" for m in data["missing"]]
    if data["notes"]:
        lines += ["", "notes", *(f"  {note}" for note in data["notes"])]
    if data["faults"]:
        lines += ["", "faults", *(f"  {fault}" for fault in data["faults"])]
    return "\n".join(lines)
