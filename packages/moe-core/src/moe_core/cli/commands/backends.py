"""``moe backends``: which backend runs on which GPU, and what each one claims."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from moe_core.cli._output import emit, table
from moe_core.errors import ConfigError, MoEError, did_you_mean
from moe_core.interface.claims import claim_name, expand_key
from moe_core.spec.activation import MoEActivation
from moe_core.spec.quant_key import key_name

if TYPE_CHECKING:
    from moe_core.interface.claims import Claims, KeyClaim
    from moe_core.interface.experts import FusedMoEExperts
    from moe_core.selection.oracle import Oracle

#: columns of the table
DEVICES = ("sm80", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950", "cpu")

#: claims that are yes or no, as texts
_FEATURES = {
    "bias": "biases",
    "expert_map": "expert map",
    "apply_router_weight_on_input": "router weight on input",
    "lora": "LoRA",
    "batch_invariant": "batch invariant",
    "cuda_graph": "CUDA graphs",
    "keeps_nan": "NaN stays in its token",
}
_MULTIPLES = ("hidden_multiple", "intermediate_multiple", "whole_groups")

_LEGEND = """\
run: tested on such a device; yes: claimed, compiled at most; -: not claimed.
The first from above that fits a layer is taken.{orders}
*: the library that it calls is not installed.
All claims: moe backends -v, or moe backends --scheme S --backend B."""


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code.
    """
    from moe_core.selection.registry import install_hint, registry

    plugins = registry()
    oracles = plugins.oracles() if args.scheme is None else (plugins.oracle(args.scheme),)
    if args.backend is not None:
        _check_backend(args.backend, oracles, args.scheme)
    rows = [
        describe(oracle.scheme, backend.name, backend.origin, experts, backend.aliases)
        for oracle in oracles
        for backend in oracle.table()
        if args.backend in (None, backend.name, *backend.aliases)
        for experts in backend.load()
    ]
    devices = {oracle.scheme: support(oracle) for oracle in oracles}
    if not rows:
        text = f"no scheme is installed; add one, e.g.: {install_hint('fp8')}"
    elif args.verbose or args.backend is not None:
        text = "\n\n".join(map(_in_full, rows))
    else:
        text = f"{_table(oracles, devices)}\n\n{_LEGEND.format(orders=''.join(_other_orders(oracles)))}"
    ordered = {oracle.scheme: orders(oracle) for oracle in oracles}
    emit(args.json, {"schemes": list(devices), "devices": devices, "orders": ordered, "backends": rows}, text)
    return 0


def _check_backend(name: str, oracles: Sequence[Oracle], scheme: str | None) -> None:
    """Raise ConfigError for a backend that none of ``oracles`` has.

    ``oracles`` are those of all schemes, or of ``scheme``.
    """
    from moe_core.selection.registry import registry

    def has(oracle: Oracle) -> set[str]:
        return {known for backend in oracle.table() for known in (backend.name, *backend.aliases)}

    known = sorted(set().union(*map(has, oracles)))
    if name in known:
        return
    meant = did_you_mean(name, known)
    others = [] if scheme is None else [oracle.scheme for oracle in registry().oracles() if name in has(oracle)]
    where = f" ({' and '.join(others)} {'has' if len(others) == 1 else 'have'})" if others else meant
    who = "no installed scheme has a" if scheme is None else f"{scheme} has no"
    raise ConfigError(f"{who} backend {name!r}{where}; known: {', '.join(known)}")


def orders(oracle: Oracle) -> dict[str, list[str]]:
    """Return the order of a scheme's backends by device.

    The key "default" has the usual order. Entries of :data:`DEVICES` appear only if their order differs. A scheme may
    move backends back that do not take the keys. Those that take them keep their order.

    Args:
        oracle: Oracle of the scheme.

    Returns:
        Names of the backends in order of preference, by device.
    """
    from moe_core.spec.config import FusedMoEConfig
    from moe_core.spec.device import DeviceInfo

    config = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=256, intermediate_size=256)
    default = [backend.name for backend in oracle.table()]
    claims = {b.name: [experts.claims for experts in b.load()] for b in oracle.table()}
    keys = [pair for mine in claims.values() for one in mine for pair in one.keys]
    pairs = dict.fromkeys((expand_key(weight)[0], expand_key(activation)[0]) for weight, activation in keys)
    found = {"default": default}
    for arch in DEVICES:
        device = DeviceInfo.parse(arch)
        for weight, activation in pairs:
            try:
                asked = oracle.priority(config, weight_key=weight, activation_key=activation, device=device)
            except MoEError:  # The scheme does not work, or does not support these keys.
                continue
            names = [backend.name for backend in asked]
            fitting = [name for name in names if any(one.takes_keys(weight, activation) for one in claims[name])]
            if fitting != [name for name in default if name in fitting]:
                found[arch] = names
                break
    return found


def _other_orders(oracles: Sequence[Oracle]) -> Iterator[str]:
    """Yield legend lines about orders that differ from the default."""
    for oracle in oracles:
        default, *others = orders(oracle).items()
        for arch, names in others:
            line = f"On {arch} {oracle.scheme} asks in another order: {', '.join(names)}."
            yield "\n" + textwrap.fill(line, 80, break_on_hyphens=False)


def support(oracle: Oracle) -> dict[str, dict[str, str]]:
    """Return the state of each backend on each device.

    Args:
        oracle: Oracle of the scheme.

    Returns:
        "run" (tested there), "claimed" or "no", by backend and device.
    """
    from moe_core.spec.device import DeviceInfo

    found: dict[str, dict[str, str]] = {}
    for backend in oracle.table():
        claims = [experts.claims for experts in backend.load()]
        found[backend.name] = {}
        for arch in DEVICES:
            device = DeviceInfo.parse(arch)
            there = [c for c in claims if any(r.reason_against(device) is None for r in c.devices)]
            seen = any(_is_on(str(getattr(item, "hardware", item)), arch) for c in there for item in c.verified_on)
            found[backend.name][arch] = "run" if seen else "claimed" if there else "no"
    return found


def _is_on(hardware: str, arch: str) -> bool:
    """Whether the hardware of a claim, "NVIDIA H200 (sm90)" or "cpu", has an architecture."""
    return hardware == arch or hardware.endswith(f"({arch})")


def _table(oracles: Sequence[Oracle], devices: dict[str, dict[str, dict[str, str]]]) -> str:
    from moe_core.spec.environment import Environment

    environment = Environment.current()
    cells = {"run": "run", "claimed": "yes", "no": "-"}
    rows = []
    for oracle in oracles:
        rows.append([oracle.scheme, *("" for _ in DEVICES)])
        for backend in oracle.table():
            lacks = all(
                any(environment.reason_against(requirement) for requirement in experts.claims.requires)
                for experts in backend.load()
            )
            found = devices[oracle.scheme][backend.name]
            rows.append([f"  {backend.name}{'*' * lacks}", *(cells[found[arch]] for arch in DEVICES)])
    return table(["backend", *DEVICES], rows)


def describe(
    scheme: str, backend: str, origin: str, experts: type[FusedMoEExperts], aliases: Sequence[str] = ()
) -> dict[str, Any]:
    """Return one backend's claims, ready for JSON.

    Args:
        scheme: Name of the scheme.
        backend: Name of the backend.
        origin: Package that brings it.
        experts: Experts class.
        aliases: Other names of the backend.

    Returns:
        The claims by name.
    """
    claims: Claims = experts.claims
    return {
        "scheme": scheme,
        "backend": backend,
        "aliases": list(aliases),
        "package": origin,
        "experts": f"{experts.__module__}:{experts.__qualname__}",
        "kind": "monolithic" if experts.is_monolithic else "modular",
        "devices": [str(device) for device in claims.devices],
        "keys": [_pair(claims, weight, activation) for weight, activation in claims.keys],
        "activations": sorted(activation.value for activation in claims.activations),
        "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in claims.dtypes),
        "formats": sorted(item.value for item in claims.formats),
        "routing_methods": sorted(m.name for m in claims.routing_methods) if claims.routing_methods else None,
        **{name: getattr(claims, name) for name in (*_FEATURES, *_MULTIPLES, "notes")},
        **{name: getattr(claims, name) or None for name in ("max_top_k", "max_experts")},
        "requires": [r.distribution + (f">={r.version}" if r.version else "") for r in claims.requires],
        "verified_on": [str(item) for item in claims.verified_on],
    }


def _pair(claims: Claims, weight: KeyClaim, activation: KeyClaim) -> dict[str, Any]:
    """Return the key names of a claimed pair, its size multiples, and where all keys were run."""
    weights, activations = expand_key(weight), expand_key(activation)
    verified = [claims.verified_for(w, a) for w in weights for a in activations]
    return {
        "weights": [key_name(key) for key in weights],
        "activations": [key_name(key) for key in activations],
        # [hidden size, intermediate size] of each weight key
        "multiples": [list(claims.multiples(key)) for key in weights],
        "verified_on": [name for name in verified[0] if all(name in others for others in verified)],
        "summary": f"{claim_name(weight)} x {claim_name(activation)}",
    }


def details(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the result of :func:`describe` as labeled texts.

    Args:
        row: Result of :func:`describe`.

    Returns:
        (label, text); the label "keys" occurs once per claimed pair.
    """
    limits = [
        f"{name} size a multiple of {row[f'{name}_multiple']}"
        for name in ("hidden", "intermediate")
        if row[f"{name}_multiple"] > 1
    ]
    if row["whole_groups"]:
        limits.append("both sizes multiples of the weights' group")
    if row["max_top_k"]:
        limits.append(f"top-k at most {row['max_top_k']}")
    if row["max_experts"]:
        limits.append(f"at most {row['max_experts']} experts")
    lines = [
        ("also called", ", ".join(row["aliases"])),
        *(("keys", pair["summary"]) for pair in row["keys"]),
        ("verified on", "; ".join(row["verified_on"]) or "nothing yet"),
        ("devices", " or ".join(row["devices"])),
        ("dtypes", ", ".join(row["dtypes"])),
        ("formats", ", ".join(row["formats"])),
        ("activations", _activations(row["activations"])),
        ("features", ", ".join(text for name, text in _FEATURES.items() if row[name])),
        ("routing", ", ".join(row["routing_methods"] or ())),
        ("limits", ", ".join(limits)),
        ("requires", ", ".join(row["requires"])),
        ("note", row["notes"]),
    ]
    return [(label, text) for label, text in lines if text]


def _activations(names: Sequence[str]) -> str:
    """Return names of activation functions, with a phrase for all gated and all ungated ones."""
    found, parts = set(names), []
    for phrase, gated in (("all gated", True), ("all without a gate", False)):
        group = {activation.value for activation in MoEActivation if activation.is_gated is gated}
        if group <= found:
            parts.append(phrase)
            found -= group
    return ", ".join([*parts, *sorted(found)])


def _in_full(row: dict[str, Any]) -> str:
    """Return one backend's claims as lines of text."""
    origin = f", of {row['package']}" if row["package"] else ""
    lines = [f"{row['scheme']} {row['backend']}: {row['experts'].partition(':')[2]} ({row['kind']}{origin})"]
    above = ""
    for label, text in details(row):
        lines.append(f"  {label if label != above else '':<11}  {text}")
        above = label
    return "\n".join(lines)
