"""Parse the names that tools give to expert tensors.

::

    <prefix>.experts.<expert>.<projection>.<suffix>       one tensor per expert
    <prefix>.experts.<projection>.<expert>.<suffix>       the same (GPTQModel's gpt-oss: ``gate_up`` and ``down``)
    <prefix>.experts.<projection>[_<suffix>|.<suffix>]    one tensor [E, ...] for all experts

``<prefix>`` contains the layer index and ends with the name of the MoE block (``model.layers.3.mlp``,
``….block_sparse_moe``, ``….mixer``, ``….feed_forward``, ``….ffn`` …). Projections are mapped to ``gate``, ``up``,
``down`` or ``gate_up`` (both in one tensor). A name without suffix gets the suffix ``weight``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

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

# Short names are recognized only before an expert id.
_BEFORE_NUMBERS = {**PROJECTIONS, "gate_up": "gate_up", "down": "down"}

_NAMED = "|".join(sorted(PROJECTIONS, key=len, reverse=True))
_NUMBERED = "|".join(sorted(_BEFORE_NUMBERS, key=len, reverse=True))
_PER_EXPERT = re.compile(rf"(?P<experts>.+\.experts)\.(?P<expert>[0-9]{{1,6}})\.(?P<proj>{_NAMED})\.(?P<suffix>.+)")
_BY_PROJECTION = re.compile(
    rf"(?P<experts>.+\.experts)\.(?P<proj>{_NUMBERED})\.(?P<expert>[0-9]{{1,6}})\.(?P<suffix>.+)"
)
_STACKED = re.compile(rf"(?P<experts>.+\.experts)\.(?P<proj>{_NAMED})(?:[._](?P<suffix>.+))?")
# Blocks without an ``experts`` component: those of Granite, and those of Step, whose projections have common names.
_BARE = re.compile(
    r"(?P<experts>.+(?:\.block_sparse_moe(?=\.(?:in|out)put_)|\.moe(?=\.(?:gate|up|down)_)))"
    r"\.(?P<proj>input_linear|output_linear|gate_proj|up_proj|down_proj)\.(?P<suffix>.+)"
)
_BARE_PROJECTIONS = {**PROJECTIONS, "input_linear": "gate_up", "output_linear": "down"}

# Multi-token prediction blocks, which reuse layer indices of the main model.
_ASIDE = re.compile(r"(^|\.)(mtp|nextn|draft|eagle)[^.]*\.")
_LAYER = re.compile(r"(?:^|\.)([0-9]{1,6})(?=\.|$)")
_EXPERTS = ".experts."


@dataclass(frozen=True)
class ExpertName:
    """The parsed name of an expert tensor.

    Attributes:
        prefix: Name prefix of the experts.
        layer: Index of the layer.
        expert: Id of the expert; None for a tensor of all experts.
        projection: "gate", "up", "down" or "gate_up".
        suffix: The rest of the name ("weight", "weight_scale").
    """

    prefix: str
    layer: int
    expert: int | None
    projection: str
    suffix: str

    @property
    def block(self) -> str:
        """Name prefix of the MoE block, under which the router is stored too."""
        return self.prefix.removesuffix(".experts")


def parse_name(name: str) -> ExpertName | None:
    """Parse the name of an expert tensor.

    Args:
        name: Name of any tensor.

    Returns:
        The parsed name, or None if it is not an expert tensor of the main model.
    """
    if _EXPERTS not in name:
        match, projections = _BARE.fullmatch(name), _BARE_PROJECTIONS
    else:
        match = _PER_EXPERT.fullmatch(name) or _BY_PROJECTION.fullmatch(name) or _STACKED.fullmatch(name)
        projections = _BEFORE_NUMBERS
    if match is None or predicts_ahead(name):
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


def predicts_ahead(name: str) -> bool:
    """Return whether a name belongs to a block for multi-token prediction (MTP, EAGLE).

    Such blocks number their layers from 0 again, so they are not layers of the main model.

    Args:
        name: Name of a tensor or module.

    Returns:
        True if it does.
    """
    return _ASIDE.search(name) is not None


Key = tuple[str, str]
"""Projection and suffix."""


@dataclass(frozen=True)
class LayerNames:
    """Names of the expert tensors of one layer.

    Attributes:
        prefix: Name prefix of the experts.
        block: Name prefix of the MoE block, under which the router is stored too.
        layer: Index of the layer.
        tensors: Names by (projection, suffix), then by expert (None for a tensor of all experts).
        twice: Pairs of names that denote the same tensor.
    """

    prefix: str
    block: str
    layer: int
    tensors: dict[Key, dict[int | None, str]] = field(default_factory=dict)
    twice: list[tuple[str, str]] = field(default_factory=list)

    def add(self, place: tuple[int | None, Key], name: str) -> None:
        """Add a name.

        Args:
            place: Expert (None for all), and (projection, suffix).
            name: Name of the tensor.
        """
        expert, key = place
        tensors = self.tensors.get(key)
        if tensors is None:
            self.tensors[key] = {expert: name}
        elif expert in tensors:
            self.twice.append((tensors[expert], name))
        else:
            tensors[expert] = name

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(tensors.values() for tensors in self.tensors.values())


class ExpertNames:
    """Expert tensors of a model, grouped by layer.

    Names are parsed in one pass with cached prefixes and endings: a model has 100,000 names, with the same endings in
    every layer.

    Args:
        names: Names of all tensors.

    Attributes:
        stacks: Layers by prefix, for each stack of layers (first component of the names).
        others: Names under an experts prefix that do not belong to a projection.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.stacks: dict[str, dict[str, LayerNames]] = {}
        self.others: list[str] = []
        layers: dict[str, LayerNames] = {}
        heads: dict[str, ExpertName | None] = {}
        tails: dict[str, _Place | None] = {}
        for name in names:
            begin, inside, end = name.partition(_EXPERTS)
            if not inside or _EXPERTS in end:
                head = parse_name(name)
                place = _place(head)
            else:
                if begin not in heads:
                    heads[begin] = parse_name(f"{begin}{_EXPERTS}0.up_proj.weight")
                if end not in tails:
                    tails[end] = _place(parse_name(f"layers.0{_EXPERTS}{end}"))
                head, place = heads[begin], tails[end]
            if head is None or place is None:
                if inside:
                    self.others.append(name)
                continue
            layer = layers.get(head.prefix)
            if layer is None:
                layer = layers[head.prefix] = LayerNames(head.prefix, head.block, head.layer)
                self.stacks.setdefault(head.prefix.partition(".")[0], {})[head.prefix] = layer
            layer.add(place, name)


#: (expert or None for all, (projection, suffix)).
_Place = tuple[int | None, Key]


def _place(parsed: ExpertName | None) -> _Place | None:
    return None if parsed is None else (parsed.expert, (parsed.projection, parsed.suffix))


def by_layer(found: Iterable[LayerNames], where: object) -> dict[int, LayerNames]:
    """Sort the layers of one stack by index.

    Args:
        found: Names of each layer.
        where: The checkpoint, for messages.

    Returns:
        Names by layer index, ascending.

    Raises:
        CheckpointError: Two prefixes have the same layer index.
    """
    layers: dict[int, LayerNames] = {}
    for names in found:
        known = layers.setdefault(names.layer, names)
        if known is not names:
            raise CheckpointError(
                f"{where}: layer {names.layer} has experts under {known.prefix!r} and under {names.prefix!r}"
            )
    return dict(sorted(layers.items()))
