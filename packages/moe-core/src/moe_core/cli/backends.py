"""moe backends: which backend runs on which GPU, and what each one claims."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_core.claims import expand_key
from moe_core.cli._output import emit, table
from moe_core.errors import ConfigError, did_you_mean
from moe_core.quant_key import KeyPattern, key_name

if TYPE_CHECKING:
    from moe_core.claims import Claims, KeyClaim
    from moe_core.experts import FusedMoEExperts
    from moe_core.oracle import Oracle

#: columns of the table
DEVICES = ("sm80", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950", "cpu")

_LEGEND = """\
run: tested on such a device; yes: claimed, compiled at most; -: not claimed.
The first from above that fits a layer is taken.
*: the library that it calls is not installed.
All claims: moe backends -v, or moe backends --scheme S --backend B."""


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit code."""
    from moe_core.registry import install_hint, registry

    plugins = registry()
    oracles = plugins.oracles() if args.scheme is None else (plugins.oracle(args.scheme),)
    if args.backend is not None:
        known = sorted({backend.name for oracle in oracles for backend in oracle.table()})
        if args.backend not in known:
            meant = did_you_mean(args.backend, known)
            raise ConfigError(f"no installed scheme has a backend {args.backend!r}{meant}; known: {', '.join(known)}")
    rows = [
        describe(oracle.scheme, backend.name, backend.origin, experts)
        for oracle in oracles
        for backend in oracle.table()
        if args.backend in (None, backend.name)
        for experts in backend.load()
    ]
    devices = {oracle.scheme: support(oracle) for oracle in oracles}
    if not rows:
        text = f"no scheme is installed; add one, e.g.: {install_hint('fp8')}"
    elif args.verbose or args.backend is not None:
        text = "\n\n".join(map(_details, rows))
    else:
        text = f"{_table(oracles, devices)}\n\n{_LEGEND}"
    emit(args.json, {"schemes": list(devices), "devices": devices, "backends": rows}, text)
    return 0


def support(oracle: Oracle) -> dict[str, dict[str, str]]:
    """What each backend is on each device: "run" on it, "claimed", or "no"; by backend and device."""
    from moe_core.device import DeviceInfo

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
    """Whether hardware that a claim names, "NVIDIA H200 (sm90)" or "cpu", is of an architecture."""
    return hardware == arch or hardware.endswith(f"({arch})")


def _table(oracles: Sequence[Oracle], devices: dict[str, dict[str, dict[str, str]]]) -> str:
    from moe_core.environment import Environment

    environment = Environment.current()
    marks = {"run": "run", "claimed": "yes", "no": "-"}
    rows = []
    for oracle in oracles:
        rows.append([oracle.scheme, *("" for _ in DEVICES)])
        for backend in oracle.table():
            lacks = all(
                any(environment.reason_against(requirement) for requirement in experts.claims.requires)
                for experts in backend.load()
            )
            found = devices[oracle.scheme][backend.name]
            rows.append([f"  {backend.name}{'*' * lacks}", *(marks[found[arch]] for arch in DEVICES)])
    return table(["backend", *DEVICES], rows)


def describe(scheme: str, backend: str, origin: str, experts: type[FusedMoEExperts]) -> dict[str, Any]:
    """One backend's claims, ready for JSON."""
    claims: Claims = experts.claims
    return {
        "scheme": scheme,
        "backend": backend,
        "package": origin,
        "experts": f"{experts.__module__}:{experts.__qualname__}",
        "kind": "monolithic" if experts.is_monolithic else "modular",
        "devices": [str(device) for device in claims.devices],
        "keys": [_pair(claims, weight, activation) for weight, activation in claims.keys],
        "activations": sorted(activation.value for activation in claims.activations),
        "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in claims.dtypes),
        "formats": sorted(item.value for item in claims.formats),
        "bias": claims.bias,
        "expert_map": claims.expert_map,
        "apply_router_weight_on_input": claims.apply_router_weight_on_input,
        "lora": claims.lora,
        "batch_invariant": claims.batch_invariant,
        "cuda_graph": claims.cuda_graph,
        "keeps_nan": claims.keeps_nan,
        "routing_methods": sorted(m.name for m in claims.routing_methods) if claims.routing_methods else None,
        "hidden_multiple": claims.hidden_multiple,
        "intermediate_multiple": claims.intermediate_multiple,
        "max_top_k": claims.max_top_k or None,
        "max_experts": claims.max_experts or None,
        "requires": [str(requirement.distribution) for requirement in claims.requires],
        "verified_on": [str(item) for item in claims.verified_on],
        "notes": claims.notes,
    }


def _pair(claims: Claims, weight: KeyClaim, activation: KeyClaim) -> dict[str, Any]:
    """Names of the keys of a claimed pair, what sizes must divide by, and where every one of them was run."""
    weights, activations = expand_key(weight), expand_key(activation)
    verified = [claims.verified_for(w, a) for w in weights for a in activations]
    return {
        "weights": [key_name(key) for key in weights],
        "activations": [key_name(key) for key in activations],
        # [hidden size, intermediate size] of each of the weights
        "multiples": [list(claims.multiples(key)) for key in weights],
        "verified_on": [name for name in verified[0] if all(name in others for others in verified)],
        "summary": f"{_set_of_keys(weight)} x {_set_of_keys(activation)}",
    }


def _set_of_keys(claim: KeyClaim) -> str:
    """The keys that a claim covers: a key's name, with every choice of each word in its brackets."""
    if not isinstance(claim, KeyPattern):
        return key_name(claim)
    shapes, dtypes, permuted, pre_scaled = claim.choices
    choices = [
        " | ".join(dict.fromkeys(key_name(claim.base.with_group(s.row, s.col)) for s in shapes)),
        "|".join(str(dtype).removeprefix("torch.").replace("uint8", "e8m0") for dtype in dtypes if len(dtypes) > 1),
        "permuted" if True in permuted else "",
        "pre_scaled" if True in pre_scaled else "",
    ]
    words = [choice for choice in choices[1:] if choice]
    return choices[0] + (f" (also {', '.join(words)})" if words else "")


def _details(row: dict[str, Any]) -> str:
    flags = [
        ("biases", "bias"),
        ("expert map", "expert_map"),
        ("router weight on input", "apply_router_weight_on_input"),
        ("LoRA", "lora"),
        ("batch invariant", "batch_invariant"),
        ("CUDA graphs", "cuda_graph"),
        ("NaN stays in its token", "keeps_nan"),
    ]
    lines = [
        f"{row['scheme']} {row['backend']}: {row['experts'].partition(':')[2]} ({row['kind']}"
        + (f", of {row['package']})" if row["package"] else ")"),
        f"  devices      {' or '.join(row['devices'])}",
    ]
    for number, pair in enumerate(row["keys"]):
        head = "keys" if number == 0 else ""
        seen = f"tested on {', '.join(pair['verified_on'])}" if pair["verified_on"] else "not tested on hardware"
        lines.append(f"  {head:<11}  {pair['summary']}: {seen}")
    lines += [
        f"  activations  {', '.join(row['activations'])}",
        f"  dtypes       {', '.join(row['dtypes'])}; formats: {', '.join(row['formats'])}",
        f"  takes        {', '.join(name for name, key in flags if row[key]) or '-'}",
    ]
    if row["requires"]:
        lines.append(f"  requires     {', '.join(row['requires'])}")
    if row["notes"]:
        lines.append(f"  note         {row['notes']}")
    return "\n".join(lines)
