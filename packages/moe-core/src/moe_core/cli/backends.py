"""moe backends: every installed backend and what it claims."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from moe_core.claims import expand_key
from moe_core.cli._output import emit
from moe_core.quant_key import key_name

if TYPE_CHECKING:
    from moe_core.claims import Claims, KeyClaim
    from moe_core.experts import FusedMoEExperts


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit code."""
    from moe_core.registry import install_hint, registry

    plugins = registry()
    names = plugins.scheme_names() if args.scheme is None else (args.scheme,)
    rows = [
        describe(name, backend.name, backend.origin, experts)
        for name in names
        for backend in plugins.oracle(name).table()
        for experts in backend.load()
    ]
    text = "\n\n".join(map(_text, rows)) if rows else f"no scheme is installed; add one, e.g.: {install_hint('fp8')}"
    emit(args.json, {"schemes": list(names), "backends": rows}, text)
    return 0


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
        "routing_methods": sorted(m.name for m in claims.routing_methods) if claims.routing_methods else None,
        "hidden_multiple": claims.hidden_multiple,
        "intermediate_multiple": claims.intermediate_multiple,
        "max_top_k": claims.max_top_k or None,
        "max_experts": claims.max_experts or None,
        "requires": [str(requirement.distribution) for requirement in claims.requires],
        "verified_on": [str(item) for item in claims.verified_on],
        "notes": claims.notes,
    }


def _pair(claims: Claims, weight: KeyClaim, activation: KeyClaim) -> dict[str, list[Any]]:
    """Names of the keys of a claimed pair, what sizes must divide by, and where every one of them was run."""
    weights, activations = expand_key(weight), expand_key(activation)
    verified = [claims.verified_for(w, a) for w in weights for a in activations]
    return {
        "weights": [key_name(key) for key in weights],
        "activations": [key_name(key) for key in activations],
        # [hidden size, intermediate size] of each of the weights
        "multiples": [list(claims.multiples(key)) for key in weights],
        "verified_on": [name for name in verified[0] if all(name in others for others in verified)],
    }


def _text(row: dict[str, Any]) -> str:
    flags = [
        ("biases", "bias"),
        ("expert map", "expert_map"),
        ("router weight on input", "apply_router_weight_on_input"),
        ("LoRA", "lora"),
        ("batch invariant", "batch_invariant"),
        ("CUDA graphs", "cuda_graph"),
    ]
    lines = [
        f"{row['scheme']} {row['backend']}  [{row['experts'].partition(':')[2]}, {row['kind']}"
        + (f", {row['package']}]" if row["package"] else "]"),
        f"  devices      {' or '.join(row['devices'])}",
    ]
    for number, pair in enumerate(row["keys"]):
        head = "keys" if number == 0 else ""
        seen = ", ".join(pair["verified_on"]) or "not run"
        lines.append(f"  {head:<11}  {' | '.join(pair['weights'])}  x  {' | '.join(pair['activations'])}  ({seen})")
    lines += [
        f"  activations  {', '.join(row['activations'])}",
        f"  dtypes       {', '.join(row['dtypes'])}; formats: {', '.join(row['formats'])}",
        f"  takes        {', '.join(name for name, key in flags if row[key]) or '-'}",
        *([] if row["verified_on"] else ["  run on       no hardware yet: compiled only"]),
    ]
    if row["requires"]:
        lines.append(f"  requires     {', '.join(row['requires'])}")
    if row["notes"]:
        lines.append(f"  note         {row['notes']}")
    return "\n".join(lines)
