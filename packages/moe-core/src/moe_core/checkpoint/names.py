"""How tools name the tensors of experts, as one grammar.

::

    <prefix>.experts.<expert>.<projection>.<suffix>       one tensor per expert
    <prefix>.experts.<projection>[_<suffix>|.<suffix>]    one tensor [E, ...] for all of them

``<prefix>`` ends with the block's own name (``model.layers.3.mlp``, ``….block_sparse_moe``, ``….mixer``,
``….feed_forward``, ``….ffn`` …) and holds the layer's number.  Projections become ``gate``, ``up``, ``down`` or
``gate_up`` (both in one tensor); the tensor without a suffix of its own has the suffix ``weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from moe_core.errors import CheckpointError

PROJECTIONS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj": "gate_up",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "w13": "gate_up",
}

_NAMED = "|".join(sorted(PROJECTIONS, key=len, reverse=True))
_PER_EXPERT = re.compile(rf"(?P<experts>.+\.experts)\.(?P<expert>[0-9]{{1,6}})\.(?P<proj>{_NAMED})\.(?P<suffix>.+)")
_STACKED = re.compile(rf"(?P<experts>.+\.experts)\.(?P<proj>{_NAMED})(?:[._](?P<suffix>.+))?")
# Granite's own names; the block has no part called experts
_GRANITE = re.compile(r"(?P<experts>.+\.block_sparse_moe)\.(?P<proj>input_linear|output_linear)\.(?P<suffix>.+)")
_GRANITE_PROJECTIONS = {"input_linear": "gate_up", "output_linear": "down"}

# blocks that predict further tokens repeat the layer numbers of the model proper
_ASIDE = re.compile(r"(^|\.)(mtp|nextn|draft|eagle)[^.]*\.")
_LAYER = re.compile(r"(?:^|\.)([0-9]{1,6})(?=\.|$)")


@dataclass(frozen=True)
class ExpertName:
    """A tensor's name, taken apart.  ``expert`` None: it holds all experts of the layer."""

    prefix: str
    layer: int
    expert: int | None
    projection: str
    suffix: str

    @property
    def block(self) -> str:
        """Prefix of the MoE block, beside whose experts the router lies."""
        return self.prefix.removesuffix(".experts")


def parse_name(name: str) -> ExpertName | None:
    """The parts of an expert tensor's name; None for any other tensor."""
    if ".experts." not in name:
        match, projections = _GRANITE.fullmatch(name), _GRANITE_PROJECTIONS
    else:
        match, projections = _PER_EXPERT.fullmatch(name) or _STACKED.fullmatch(name), PROJECTIONS
    if match is None or _ASIDE.search(name):
        return None
    indices = _LAYER.findall(match["experts"])
    if not indices:
        return None
    expert = match.groupdict().get("expert")
    return ExpertName(
        prefix=match["experts"],
        layer=int(indices[-1]),
        expert=None if expert is None else int(expert),
        projection=projections[match["proj"]],
        suffix=match["suffix"] or "weight",
    )


Named = tuple[str, ExpertName]
"""A tensor's name, whole and taken apart."""


def by_stack(names: Iterable[str]) -> dict[str, list[Named]]:
    """The expert tensors among ``names`` by their stack of layers, which is the first part of their names."""
    stacks: dict[str, list[Named]] = {}
    for name in names:
        parsed = parse_name(name)
        if parsed is not None:
            stacks.setdefault(parsed.prefix.partition(".")[0], []).append((name, parsed))
    return stacks


def by_layer(tensors: Iterable[Named], where: object) -> dict[int, list[Named]]:
    """Expert tensors by layer number, in order; ``where`` they are, for CheckpointError."""
    prefixes: dict[int, str] = {}
    layers: dict[int, list[Named]] = {}
    for name, parsed in tensors:
        known = prefixes.setdefault(parsed.layer, parsed.prefix)
        if known != parsed.prefix:
            raise CheckpointError(
                f"{where}: layer {parsed.layer} has experts under {known!r} and under {parsed.prefix!r}"
            )
        layers.setdefault(parsed.layer, []).append((name, parsed))
    return dict(sorted(layers.items()))
