"""How tools name the tensors of experts, as one grammar.

::

    <prefix>.experts.<expert>.<projection>.<suffix>       one tensor per expert
    <prefix>.experts.<projection>.<expert>.<suffix>       the same (GPTQModel's gpt-oss: ``gate_up`` and ``down``)
    <prefix>.experts.<projection>[_<suffix>|.<suffix>]    one tensor [E, ...] for all of them

``<prefix>`` ends with the block's own name (``model.layers.3.mlp``, ``….block_sparse_moe``, ``….mixer``,
``….feed_forward``, ``….ffn`` …) and holds the layer's number.  Projections become ``gate``, ``up``, ``down`` or
``gate_up`` (both in one tensor); the tensor without a suffix of its own has the suffix ``weight``.
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

# short names that stand before an expert's number alone
_BEFORE_NUMBERS = {**PROJECTIONS, "gate_up": "gate_up", "down": "down"}

_NAMED = "|".join(sorted(PROJECTIONS, key=len, reverse=True))
_NUMBERED = "|".join(sorted(_BEFORE_NUMBERS, key=len, reverse=True))
_PER_EXPERT = re.compile(rf"(?P<experts>.+\.experts)\.(?P<expert>[0-9]{{1,6}})\.(?P<proj>{_NAMED})\.(?P<suffix>.+)")
_BY_PROJECTION = re.compile(
    rf"(?P<experts>.+\.experts)\.(?P<proj>{_NUMBERED})\.(?P<expert>[0-9]{{1,6}})\.(?P<suffix>.+)"
)
_STACKED = re.compile(rf"(?P<experts>.+\.experts)\.(?P<proj>{_NAMED})(?:[._](?P<suffix>.+))?")
# blocks that have no part called experts: Granite's, and Step's, whose projections have usual names
_BARE = re.compile(
    r"(?P<experts>.+(?:\.block_sparse_moe(?=\.(?:in|out)put_)|\.moe(?=\.(?:gate|up|down)_)))"
    r"\.(?P<proj>input_linear|output_linear|gate_proj|up_proj|down_proj)\.(?P<suffix>.+)"
)
_BARE_PROJECTIONS = {**PROJECTIONS, "input_linear": "gate_up", "output_linear": "down"}

# blocks that predict further tokens repeat the layer numbers of the model proper
_ASIDE = re.compile(r"(^|\.)(mtp|nextn|draft|eagle)[^.]*\.")
_LAYER = re.compile(r"(?:^|\.)([0-9]{1,6})(?=\.|$)")
_EXPERTS = ".experts."


@dataclass(frozen=True)
class ExpertName:
    """A tensor's parsed name.  ``expert`` None: it holds all experts of the layer."""

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
    """Whether a tensor or module ``name`` belongs to a block that predicts further tokens (MTP, EAGLE).

    Such blocks count their layers from 0 again, so they are not layers of the model proper.
    """
    return _ASIDE.search(name) is not None


Key = tuple[str, str]
"""Projection and suffix."""


@dataclass(frozen=True)
class LayerNames:
    """Names of the expert tensors of one layer.

    - ``prefix`` of the experts, ``block`` beside whose experts the router lies, ``layer``: its number
    - ``tensors``: names by projection and suffix, then by expert (None: all of the layer)
    - ``twice``: pairs of names that mean the same tensor
    """

    prefix: str
    block: str
    layer: int
    tensors: dict[Key, dict[int | None, str]] = field(default_factory=dict)
    twice: list[tuple[str, str]] = field(default_factory=list)

    def add(self, place: tuple[int | None, Key], name: str) -> None:
        """One more name."""
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
    """The expert tensors among ``names``, in one pass: a model has 100,000, with the same ends in every layer.

    ``stacks``: of each stack of layers, which is the first part of the names, its layers by prefix; ``others``: names
    that lie among experts and are no projection's.
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


#: an expert (None: all), and which of its tensors
_Place = tuple[int | None, Key]


def _place(parsed: ExpertName | None) -> _Place | None:
    return None if parsed is None else (parsed.expert, (parsed.projection, parsed.suffix))


def by_layer(found: Iterable[LayerNames], where: object) -> dict[int, LayerNames]:
    """Layers of one stack by number, in order; ``where`` they are, for CheckpointError."""
    layers: dict[int, LayerNames] = {}
    for names in found:
        known = layers.setdefault(names.layer, names)
        if known is not names:
            raise CheckpointError(
                f"{where}: layer {names.layer} has experts under {known.prefix!r} and under {names.prefix!r}"
            )
    return dict(sorted(layers.items()))
