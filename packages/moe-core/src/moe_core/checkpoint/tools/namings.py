"""Translate module names between the naming schemes of a model.

Tools key their settings by module paths of the model that they quantized, but store tensors under the names of the
published checkpoint. The two differ if transformers renames modules while loading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.reader import Checkpoint

T = TypeVar("T")

#: Prefixes of the language model's layers.
_STARTS = (
    "model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.text_model.",
    "backbone.",
    "",
)
#: Names of a layer's MoE block.
_BLOCKS = ("mlp", "block_sparse_moe", "mixer", "feed_forward", "ffn", "moe")
#: Synonyms of each projection of an expert.
_FUSED = "gate_up_proj"
_ENDS = (("gate_proj", "w1", _FUSED), ("up_proj", "w3", _FUSED), ("down_proj", "w2"))
#: The other of gate and up in the same naming.
_OTHER_HALF = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}

#: Classes of shared experts, which are treated as linear modules here.
_SHARED_EXPERTS = frozenset({"InklingSharedExperts"})

_MODULE = re.compile(r"(?P<start>.*?)layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"(?P<block>.+)\.experts\.(?P<expert>\d+\.)?(?P<end>\w+)")
_DENSE = re.compile(
    rf"layers\.\d+\.({'|'.join(_BLOCKS)})\.(?:{'|'.join(dict.fromkeys(end for ends in _ENDS for end in ends))})\."
)


def under_any_name(named: Callable[[str], T | None], layer: LayerExperts) -> Callable[[str], T | None]:
    """Extend a lookup by module name to the module's names in other namings of the model.

    The name of a fused gate and up stands for gate and for up only if the lookup finds neither of them alone. A pattern
    such as ``.*gate.*`` names gate_proj, and not up_proj through gate_up_proj.

    If a lookup fails under all names of an expert's module, the other names of the same projection of other experts
    are not tried: a layer has hundreds of experts, and each module hundreds of names.

    Args:
        named: Returns a result for a module's name, or None.
        layer: The layer's expert tensors.

    Returns:
        Function that returns ``named`` of a module's name, or else of the first other name with a result.
    """
    unnamed: set[str] = set()

    def direct(module: str, fused: bool = False) -> T | None:
        names = (name for name in other_names(module, layer.checkpoint) if name.endswith(_FUSED) is fused)
        return next((found for name in names if (found := named(name)) is not None), None)

    def choose(module: str) -> T | None:
        found = named(module)
        siblings = re.sub(r"\.experts\.\d+\.", ".experts.", module)
        if found is not None or siblings in unnamed:
            return found
        found = direct(module)
        if found is None:
            # Settings that name gate or up alone are of a model with both, in which no module is fused.
            start, dot, end = module.rpartition(".")
            other = start + dot + _OTHER_HALF.get(end, end)
            if named(other) is None and direct(other) is None:
                found = direct(module, fused=True)
        if found is None:
            unnamed.add(siblings)
        return found

    return choose


def other_names(module: str, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the names of a language-model module in other namings of the model.

    For a module of an expert, the names of the module that holds all experts are included. Block names that the
    checkpoint uses for dense layers are excluded, because they denote other modules.

    Args:
        module: Name of the module.
        checkpoint: The open checkpoint.

    Yields:
        The names.
    """
    match = _MODULE.fullmatch(module)
    if match is None:
        return
    starts = dict.fromkeys((match["start"], *_STARTS))
    expert = _EXPERT.fullmatch(match["rest"])
    if expert is None:
        # Only under the prefixes of the language model: layers of a vision tower are numbered too.
        for start in starts if match["start"] in _STARTS else ():
            yield f"{start}layers.{match['layer']}.{match['rest']}"
        return
    ends = dict.fromkeys((expert["end"], *(end for ends in _ENDS if expert["end"] in ends for end in ends)))
    dense = checkpoint.once(_DENSE, lambda: {found[1] for name in checkpoint.names if (found := _DENSE.search(name))})
    blocks = dict.fromkeys((expert["block"], *(block for block in _BLOCKS if block not in dense)))
    for start in starts:
        for block in blocks:
            experts = f"{start}layers.{match['layer']}.{block}.experts"
            yield from (f"{experts}.{expert['expert'] or ''}{end}" for end in ends)
            yield experts


def is_experts_class(name: str) -> bool:
    """Return whether a class name denotes modules that hold a layer's routed experts.

    Args:
        name: Name of a class ("Qwen3MoeExperts", "FusedMoE", "RoutedExperts").

    Returns:
        True if it does.
    """
    return name.isidentifier() and name.lower().endswith(("experts", "moe")) and name not in _SHARED_EXPERTS
