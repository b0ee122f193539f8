"""Writes what the documents say of the backends from the backends' own claims.

Usage: ``python tools/generate_docs.py --write`` renews ``docs/backends.md``; ``--check`` fails where it is out of date.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import torch
from moe_core import GATED, NON_GATED, Claims, MoEActivation, Oracle, registry
from moe_core.claims import expand_key, key_matches
from moe_core.cli.backends import DEVICES, support
from moe_core.quant_key import key_name

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "backends.md"
NOXFILE = ROOT / "noxfile.py"

INTRODUCTION = """\
# Backends and their claims

<!-- Written by tools/generate_docs.py from the claims in the code; `nox -s docs -- --write` renews it. -->

What each backend says it can do. Selection, `moe backends` and the conformance kit read the same claims, and a claim
is tested wherever the backend can run. *Verified on* names the hardware on which the conformance run passed. A key
such as `kFp8Static128BlockSym[64x128]` is the constant of that name with another group of rows x columns; others differ
from theirs in the scales' dtype, in activation order (`permuted`) or in factors of the inputs (`pre_scaled`). These are
the names that `--weight-key` and `key_by_name` read. Triton kernels are also compiled, without being run, for those of
the following architectures that their backend claims:
{targets}.
Whatever else a claim includes, newer devices above all, was neither compiled for nor run on.
"""


def targets() -> str:
    """The architectures that the checks compile for, as noxfile.py lists them."""
    for node in ast.parse(NOXFILE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "TARGETS":
            *first, last = ast.literal_eval(node.value)
            return f"{', '.join(first)} and {last}"
    raise LookupError(f"{NOXFILE} has no TARGETS")


def activations(found: frozenset[MoEActivation]) -> str:
    """Names of activations, all gated or all plain ones at once where that is meant."""
    parts = []
    for name, group in (("all gated", GATED), ("all without a gate", NON_GATED)):
        if group <= found:
            parts.append(name)
            found -= group
    return ", ".join([*parts, *sorted(a.value for a in found)])


def dtypes(found: frozenset[torch.dtype]) -> str:
    """Names of dtypes, without torch's prefix."""
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))


def features(claims: Claims) -> str:
    """The yes/no claims that hold."""
    names = {
        "bias": "biases",
        "expert_map": "expert map",
        "apply_router_weight_on_input": "router weight on input",
        "lora": "LoRA",
        "batch_invariant": "batch invariant",
        "cuda_graph": "CUDA graphs",
        "keeps_nan": "NaN stays in its token",
    }
    return ", ".join(text for name, text in names.items() if getattr(claims, name))


def limits(claims: Claims) -> str:
    """Sizes that a backend demands, and what must be installed."""
    parts = []
    for name in ("hidden", "intermediate"):
        multiple = getattr(claims, f"{name}_multiple")
        if multiple > 1:
            parts.append(f"{name} size a multiple of {multiple}")
    if claims.whole_groups:
        parts.append("both sizes multiples of the weights' group")
    if claims.max_top_k:
        parts.append(f"top-k at most {claims.max_top_k}")
    if claims.max_experts:
        parts.append(f"at most {claims.max_experts} experts")
    parts += [f"{r.distribution} ≥ {r.version}" if r.version else r.distribution for r in claims.requires]
    return ", ".join(parts)


def keys(claims: Claims) -> str:
    """A table of the claimed keys, and where each pair was run: one row for weights that are alike in both."""
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for weight in dict.fromkeys(w for claim, _ in claims.keys for w in expand_key(claim)):
        by_hardware: dict[tuple[str, ...], list[str]] = {}
        for claim, other in claims.keys:
            if key_matches(claim, weight):
                for activation in expand_key(other):
                    by_hardware.setdefault(claims.verified_for(weight, activation), []).append(key_name(activation))
        for hardware, found in by_hardware.items():
            alike.setdefault((tuple(found), hardware), []).append(key_name(weight))
    rows = "".join(
        f"| {'<br>'.join(weights)} | {'<br>'.join(found)} | {', '.join(hardware) or 'nothing yet'} |\n"
        for (found, hardware), weights in alike.items()
    )
    return f"\n| weights | activations | verified on |\n|---|---|---|\n{rows}"


def section(oracle: Oracle) -> str:
    """One scheme: its backends in default order, a table of claims for each."""
    text = f"\n## {oracle.scheme}\n\nIn the order of preference; **run**: tested on such a device, yes: claimed.\n\n"
    text += f"| backend | {' | '.join(DEVICES)} |\n|---|{'---|' * len(DEVICES)}\n"
    marks = {"run": "**run**", "claimed": "yes", "no": ""}
    for name, found in support(oracle).items():
        text += f"| `{name}` | {' | '.join(marks[found[arch]] for arch in DEVICES)} |\n"
    for backend in oracle.table():
        for experts in backend.load():
            claims = experts.claims
            rows = {
                "devices": ", ".join(map(str, claims.devices)),
                "activation functions": activations(claims.activations),
                "hidden states": dtypes(claims.dtypes),
                "formats": ", ".join(sorted(f.value for f in claims.formats)),
                "kind": "monolithic (routes by itself)" if experts.is_monolithic else "modular",
                "also": features(claims),
                "needs": limits(claims),
                "note": claims.notes,
            }
            text += f"\n### `{backend.name}`: {experts.__name__}\n\n| | |\n|---|---|\n"
            text += "".join(f"| {name} | {value} |\n" for name, value in rows.items() if value)
            text += keys(claims)
    return text


def main(argument: str) -> int:
    """Writes or checks the document; returns the exit code."""
    text = INTRODUCTION.format(targets=targets()) + "".join(map(section, registry().oracles()))
    if argument == "--write":
        DOCUMENT.write_text(text, encoding="utf-8")
    elif not DOCUMENT.exists() or DOCUMENT.read_text(encoding="utf-8") != text:
        print(f"{DOCUMENT} is out of date; renew it with: nox -s docs -- --write")
        return 1
    print(f"{DOCUMENT.name}: {'written' if argument == '--write' else 'up to date'}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] not in (["--write"], ["--check"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
