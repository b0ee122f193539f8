"""Layers as comparable values, and the content of a folder read without the package.

The latter is deliberately simple, because changes are judged by it.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.reference.quantization import dequantize_weight
from moe_core.selection.registry import Registry
from moe_core.spec.weights import MoEWeights
from torch import Tensor

HEADER = 8


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer.

    Attributes:
        facts: Sizes, routing and keys by name.
        values: Tensors that it computes with, by name.
    """

    facts: Mapping[str, Any]
    values: Mapping[str, Tensor]

    def differences(self, other: Layer) -> set[str]:
        """Return the names of facts and values that differ; values of experts as ``name[expert]``.

        Args:
            other: The other layer.

        Returns:
            The names.
        """
        found = {
            name
            for name in self.facts.keys() | other.facts.keys()
            if not _equal(self.facts.get(name), other.facts.get(name))
        }
        for name in self.values.keys() | other.values.keys():
            mine, theirs = self.values.get(name), other.values.get(name)
            if mine is None or theirs is None or mine.shape != theirs.shape or name.startswith("router"):
                if mine is None or theirs is None or not torch.equal(mine, theirs):
                    found.add(name)
                continue
            unlike = (mine != theirs).reshape(mine.shape[0], -1).any(dim=1)
            found |= {f"{name}[{expert}]" for expert in unlike.nonzero().flatten().tolist()}
        return found


def _equal(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


def read_folder(folder: Path, plugins: Registry | None = None) -> Layer:
    """Read the first layer with experts of a checkpoint folder.

    Args:
        folder: The checkpoint folder.
        plugins: Plug-ins that read it; None for the installed ones.

    Returns:
        The layer.

    Raises:
        MoEError: The folder is refused.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = read_layer(Checkpoint.open(folder), plugins=plugins or _installed())
        weights = found.weights()
    weights.validate(found.config, values=True)
    facts: dict[str, Any] = {
        "index": found.index,
        "scheme": found.scheme,
        "activation_key": found.activation_key,
        "experts": found.experts,
    }
    for part in fields(found.config):
        value = getattr(found.config, part.name)
        if part.name == "routing" and value is not None:
            facts.update({f"routing.{inner.name}": getattr(value, inner.name) for inner in fields(value)})
        else:
            facts[part.name] = value
    values = {
        name: tensor.double()
        for name, tensor in (
            ("router_weight", found.router_weight),
            ("router_bias", found.router_bias),
            ("router_correction_bias", found.correction_bias),
        )
        if tensor is not None
    }
    values.update(_values(weights, parts=2 if found.config.is_gated else 1, config=found.config))
    return Layer(facts, values)


@functools.cache
def _installed() -> Registry:
    """Registry of the installed plug-ins, whose entry points are looked up once."""
    return Registry(functools.cache(lambda group: list(entry_points(group=group))))


def _values(weights: MoEWeights, parts: int, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the value of every tensor, independent of its storage format."""
    named = dict(weights.tensors())
    for name, cols in (("w13", config.hidden_size), ("w2", config.intermediate_size)):
        weight, scale = named.pop(name), named.pop(f"{name}_scale", None)
        zero, g_idx = named.pop(f"{name}_zero_point", None), named.pop(f"{name}_g_idx", None)
        if weights.weight_key is None or scale is None:
            yield name, weight.double()
            continue
        wide = dequantize_weight(
            weight,
            scale,
            weights.weight_key,
            parts=parts if name == "w13" else 1,
            zero_point=zero,
            g_idx=g_idx,
            cols=cols,
        )
        yield name, wide.double()
    for name, tensor in named.items():
        yield name, tensor.double()


# ------------------------------------------------------------------ without the package

#: value of a missing entry
MISSING = "<missing>"


def statements(content: bytes) -> dict[tuple[str, ...], Any] | None:
    """Return all leaf entries of a JSON text by path.

    Args:
        content: The text.

    Returns:
        Values by path; None if the text is not valid JSON.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    found: dict[tuple[str, ...], Any] = {}
    todo: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while todo:
        path, inner = todo.pop()
        if isinstance(inner, dict) and inner:
            todo += [((*path, key), one) for key, one in inner.items()]
        elif isinstance(inner, list) and any(isinstance(one, (dict, list)) for one in inner):
            todo += [((*path, str(at)), one) for at, one in enumerate(inner)]
        else:
            found[path] = inner
    return found


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its header states it.

    Attributes:
        dtype: Name of the dtype.
        shape: The shape.
        data: The bytes.
    """

    dtype: Any
    shape: Any
    data: bytes


def stored_tensors(content: bytes) -> dict[str, StoredTensor] | None:
    """Parse a safetensors file according to the definition of the format.

    Args:
        content: The file.

    Returns:
        Tensors by name; None if the file is not valid.
    """
    length = int.from_bytes(content[:HEADER], "little")
    try:
        header = json.loads(content[HEADER : HEADER + length])
        data = content[HEADER + length :]
        return {
            name: StoredTensor(entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
