"""Text of docs/backends.md, generated from the claims of the backends."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from moe_core import Oracle, registry
from moe_core.cli.commands.backends import DEVICES, describe, details, orders, support
from moe_core.parallel.prepare_finalize.by_name import ALL2ALL_BACKENDS, REDUCTIONS, load_prepare_finalize

NOXFILE = Path(__file__).parent.parent / "noxfile.py"
WIDTH = 120

INTRODUCTION = """\
# Backends and their claims

<!-- Written by tools/generate_docs.py from the claims in the code; `nox -s docs -- --write` renews it. -->

What each backend says it can do. Selection, `moe backends` and the conformance kit read the same claims, and a claim
is tested wherever the backend can run.

- **keys**: weights x activations, by the names that `--weight-key` and `key_by_name` read. `kInt4Static[1x64,float16]`
  is the constant `kInt4Static` with another group (rows x columns, or `per_row`) and another scale dtype; `permuted`
  means activation order, `pre_scaled` a factor per input column. Here a name stands for a set of keys: `|` separates
  choices, and a word with `?` may be missing.
- **verified on**: hardware on which the conformance kit passed. Triton kernels are also compiled, without being run,
  for those of {targets} that their backend claims. Whatever
  else a claim covers, newer devices above all, was neither compiled for nor run on.

## Backends and GPUs

**run**: verified on such a device; yes: claimed. From above is the order in which they are asked, but for what
[Which backend runs a layer](#which-backend-runs-a-layer) says.

"""

CHOICE = """
## Which backend runs a layer

Of a scheme's backends the first that fits is taken, in this order. Those that are not installed, or whose claims leave
out the layer, its keys or the device, are passed over; `moe explain` and `Selection.report` give every reason.

| scheme | on | asked in this order |
|---|---|---|
{orders}
- Backends that a package adds are asked before `torch`, or where their `placement` says.
- `torch` claims the most, and is taken where nothing else fits. On a GPU it is a loop on the host: the report says what
  would fit instead, and making such a layer warns (`FallbackWarning`). Where it does not fit either, selection fails.
- A backend that is named (`--backend`, `moe_backend=`) is taken or refused, never replaced.
- Activations are what the checkpoint says, or what is asked for (`--activation-key`, `activation_key=`), whatever a
  backend would like.
- On several GPUs a backend must fit how tokens travel too ([distributed.md](distributed.md)).
"""


RANKS = """
## Several ranks

How tokens reach the experts of other ranks ([distributed.md](distributed.md)). **verified on**: where layers over ranks
were compared with the layer on one rank, with every scheme's own kernels; on four
H100s the first three of them were compared with each other.

| prepare/finalize | tokens quantized first | batch invariant | CUDA graphs | verified on | |
|---|---|---|---|---|---|
"""


def targets() -> str:
    """Return the architectures that the checks compile for, from noxfile.py."""
    for node in ast.parse(NOXFILE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "TARGETS":
            *first, last = ast.literal_eval(node.value)
            return f"{', '.join(first)} and {last}"
    raise LookupError(f"{NOXFILE} has no TARGETS")


def device_table(oracles: list[Oracle]) -> str:
    """Return a table of all schemes' backends by the GPUs that they claim.

    Args:
        oracles: Oracles of the schemes.

    Returns:
        A Markdown table.
    """
    cells = {"run": "**run**", "claimed": "yes", "no": ""}
    text = f"| scheme | backend | {' | '.join(DEVICES)} |\n|---|---|{'---|' * len(DEVICES)}\n"
    for oracle in oracles:
        scheme = f"[{oracle.scheme}](#{oracle.scheme})"
        for name, found in support(oracle).items():
            text += f"| {scheme} | `{name}` | {' | '.join(cells[found[arch]] for arch in DEVICES)} |\n"
            scheme = ""
    return text


def choice(oracles: list[Oracle]) -> str:
    """Return the section on how a backend is chosen, with the orders.

    Args:
        oracles: Oracles of the schemes.

    Returns:
        Markdown text.
    """
    rows = ""
    for oracle in oracles:
        found = orders(oracle)
        others = [arch for arch in found if arch != "default"]
        for arch, names in found.items():
            on = arch if arch != "default" else f"all but {', '.join(others)}" if others else "all"
            rows += f"| {oracle.scheme} | {on} | {', '.join(f'`{name}`' for name in names)} |\n"
    return CHOICE.format(orders=rows)


def ranks_table() -> str:
    """Return the section on the prepare/finalize classes that move tokens across ranks."""
    text = RANKS
    for name in (*ALL2ALL_BACKENDS, *REDUCTIONS):
        claims = load_prepare_finalize(name).claims
        flags = ("yes" if flag else "" for flag in (claims.quantizes, claims.batch_invariant, claims.cuda_graph))
        verified = "; ".join(claims.verified_on) or "nothing yet"
        text += f"| `{name}` | {' | '.join(flags)} | {verified} | {claims.notes} |\n"
    return text


def section(oracle: Oracle) -> str:
    """Return the section of one scheme: a list of claims for each experts class.

    Args:
        oracle: Oracle of the scheme.

    Returns:
        Markdown text.
    """
    text = f"\n## {oracle.scheme}\n"
    for backend in oracle.table():
        for experts in backend.load():
            row = describe(oracle.scheme, backend.name, backend.origin, experts, backend.aliases)
            text += f"\n### `{backend.name}`: {experts.__name__}\n\n"
            text += "Monolithic: it routes by itself.\n\n" if experts.is_monolithic else ""
            text += "".join(item(label, value) for label, value in details(row))
    return text


def item(label: str, value: str) -> str:
    """Format one claim as a list item in lines of at most WIDTH characters.

    Args:
        label: Name of the claim.
        value: Its text.

    Returns:
        Markdown text.
    """
    value = " x ".join(f"`{name}`" for name in value.split(" x ")) if label == "keys" else value
    lines = textwrap.wrap(
        f"- {label}: {value}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines) + "\n"


def text() -> str:
    """Return the whole document."""
    oracles = list(registry().oracles())
    return (
        INTRODUCTION.format(targets=targets())
        + device_table(oracles)
        + choice(oracles)
        + ranks_table()
        + "".join(map(section, oracles))
    )
