"""Checkpoint formats: what an adapter implements.

An adapter knows one way of storing quantised experts.  It looks at a layer once (:meth:`CheckpointFormat.resolve`),
and says how the layer lies, as an :class:`ExpertLayout` that loads it, or why the layer is not of its format.  What is
loaded are the scheme's canonical weights; an adapter never meets a backend.  It decides from the tensors as much as
from config.json, since tools write configs that don't fit their own files.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.reading_threads import in_threads
from moe_core.checkpoint.statements import tool
from moe_core.config import FusedMoEConfig
from moe_core.errors import CheckpointError
from moe_core.quant_key import QuantKey
from moe_core.weights import MoEWeights

#: of experts that are read at a time, in the form in which they are kept: small enough for a processor's cache
GROUP_BYTES = 8 << 20


@dataclass(frozen=True, eq=False)
class ExpertLayout(ABC):
    """How one layer's experts lie in a checkpoint, as a format found it out.

    - ``layer``: the tensors
    - ``weight_key``, ``activation_key``: what the canonical weights and the activations are, None for 16 bits
    """

    layer: LayerExperts
    weight_key: QuantKey | None
    activation_key: QuantKey | None

    @abstractmethod
    def load(self, config: FusedMoEConfig, *, experts: Sequence[int], device: torch.device | str = "cpu") -> MoEWeights:
        """Canonical weights of ``experts`` (global ids, in this order) on ``device``.

        Tensors are allocated once and filled expert by expert, so that no second copy of the layer exists.
        Raises CheckpointError with the name of the tensor for anything that doesn't fit ``config``.
        """

    @property
    def column_unit(self) -> int | None:
        """Columns of the intermediate size that must be read together; None where all of them must be.

        Where it is a number, :meth:`load_columns` reads those of a tensor-parallel rank alone.
        """
        return None

    def load_columns(
        self,
        config: FusedMoEConfig,
        begin: int,
        end: int,
        *,
        experts: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> MoEWeights:
        """:meth:`load` of the columns ``begin`` to ``end`` of the intermediate size; ``config`` is the whole layer's.

        Both are multiples of :attr:`column_unit`, or ``end`` is the intermediate size.
        """
        raise NotImplementedError


class CheckpointFormat(ABC):
    """One checkpoint format of a scheme.

    ``name`` for people ("fp8 block"); ``quant_methods`` that it may read: where some format names the checkpoint's
    method, only those that do say why they don't read it.  A format that another package adds to a scheme states the
    ``protocol_version`` that it was written for; a scheme's own are covered by the scheme's.
    """

    name: ClassVar[str]
    quant_methods: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def resolve(self, quantization: Mapping[str, Any], layer: LayerExperts) -> ExpertLayout | str:
        """How the layer lies, or in one clause why its tensors are not of this format.

        Looks at names, shapes, dtypes and ``quantization`` (what the folder's JSON files say), and reads no data but
        small tensors that say how others lie.  Tensors that are of this format but broken belong to it:
        :meth:`ExpertLayout.load` says what is wrong with them.
        A CheckpointError stands where no other format reads the layer; any other exception leaves the format out.
        """


def names_method(quant_methods: Sequence[str], method: object) -> bool:
    """Whether ``quant_methods`` has ``method``, or the tool that it is a variant of ("modelopt_mixed")."""
    return method in quant_methods or ("modelopt" in quant_methods and tool(method) == "modelopt")


def check_expert_tensor(
    layer: LayerExperts,
    projection: str,
    suffix: str,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    why: str = "",
    *,
    also: Sequence[Sequence[int]] = (),
) -> None:
    """CheckpointError unless the projection's tensors, of every expert, have this shape and one of these dtypes.

    ``also``: other shapes of the same values; the message names ``shape`` alone.
    """
    name = layer.name(0, projection, suffix)
    found = layer.shape(projection, suffix)
    reason = f" ({why})" if why else ""
    if found not in {tuple(accepted) for accepted in (shape, *also)}:
        raise CheckpointError(f"{name} has shape {list(found)}, expected {list(shape)}{reason}")
    if layer.dtype(projection, suffix) not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        stored = layer.dtype(projection, suffix)
        stated = layer.stored_dtype(projection, suffix) if stored is None else str(stored).removeprefix("torch.")
        raise CheckpointError(f"{name} has dtype {stated}, expected {expected}{reason}")


def load_stacked(
    layer: LayerExperts,
    projections: Sequence[str],
    suffix: str,
    *,
    experts: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    arrange: Callable[[Tensor], Tensor] | None = None,
    check: Callable[[Tensor], Tensor] | None = None,
    on_device: bool = False,
) -> Tensor:
    """Tensors of ``projections``, one below the other, for each expert: ``[len(experts), rows, ...]`` on ``device``.

    - ``dtype``: converted to it; default: as stored
    - ``arrange``: one expert's stored tensor on the CPU -> what is kept of it; ``on_device``: the tensor is brought to
      ``device`` before, where moving its bytes about is quicker
    - ``check``: what is kept of some experts, on ``device`` -> bool scalar there, True if it must be refused; all are
      looked at once, so a GPU is waited for once.  The error of a refused one is the caller's: CheckpointError with its
      name.

    Several experts are read at a time, into memory from which a GPU copies by itself.
    """
    if not experts:
        raise CheckpointError(f"{layer.prefix}: no expert was asked for")
    target = torch.device(device)
    stored = [_dtype(layer, projection, suffix) for projection in projections]
    # as stored, on the CPU: from the file straight to its place
    in_place = arrange is None and target.type == "cpu" and all(kind == (dtype or stored[0]) for kind in stored)

    def staging(shape: Sequence[int], kind: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=kind, device="cpu", pin_memory=target.type == "cuda")

    def read(some: Sequence[int], number: int) -> Tensor:
        """As stored, on the CPU or where it is arranged."""
        found = staging((len(some), *layer.shape(projections[number], suffix)), stored[number])
        layer.read_all(some, projections[number], suffix, found)
        return found.to(target) if on_device and arrange is not None else found

    # what is kept has a shape that only the first expert's tells
    first = [] if arrange is None else [arrange(read(experts[:1], number)[0]) for number in range(len(projections))]
    shapes = [tuple(part.shape) for part in first] or [layer.shape(projection, suffix) for projection in projections]
    kept = dtype or (first[0].dtype if first else stored[0])
    out = torch.empty((len(experts), sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=kept, device=device)
    starts = list(itertools.accumulate((shape[0] for shape in shapes), initial=0))

    def place(slots: slice, number: int) -> Tensor:
        return out[slots, starts[number] : starts[number + 1]]

    def fill(slots: slice) -> list[Tensor]:
        """Puts some experts into their places; what ``check`` says of each projection."""
        some = experts[slots]
        for number, projection in enumerate(projections):
            to = place(slots, number)
            if in_place:
                layer.read_all(some, projection, suffix, to)
            elif first and slots.start == 0:
                to.copy_(first[number][None])
            elif arrange is None:
                _copy(to, read(some, number))
            else:
                ready = to if on_device else staging(to.shape, kept)
                for one, found in zip(ready, read(some, number), strict=True):
                    one.copy_(arrange(found))
                if not on_device:
                    _copy(to, ready)
        return [] if check is None else [check(place(slots, number)) for number in range(len(projections))]

    each = max(1, out.nbytes // len(experts))
    begin = len(first[:1])
    groups = [slice(0, 1)] * begin + _groups(begin, len(experts), max(1, GROUP_BYTES // each))
    bad = [flag for flags in in_threads(lambda number: fill(groups[number]), len(groups), out.nbytes) for flag in flags]
    if check is not None and bool(torch.stack(bad).any()):
        every = [(slot, number) for slot in range(len(experts)) for number in range(len(projections))]
        refused = [at for at in every if bool(check(place(slice(at[0], at[0] + 1), at[1])))]
        expert, projection = experts[refused[0][0]], projections[refused[0][1]]
        name = layer.name(expert, projection, suffix) + _entry(layer, expert)
        raise BadValuesError(name, len(refused), len(every), expert=expert, projection=projection)
    return out


def _groups(begin: int, end: int, size: int) -> list[slice]:
    return [slice(at, min(at + size, end)) for at in range(begin, end, size)]


def _dtype(layer: LayerExperts, projection: str, suffix: str) -> torch.dtype:
    dtype = layer.dtype(projection, suffix)
    if dtype is None:
        name, kind = layer.name(0, projection, suffix), layer.stored_dtype(projection, suffix)
        raise CheckpointError(f"{name} has the type {kind}, which torch has not")
    return dtype


def _copy(to: Tensor, source: Tensor) -> None:
    """By bytes where types of one byte agree: torch copies rows that lie apart in the types that it computes with."""
    if to.dtype == source.dtype and to.dtype.itemsize == 1:
        to, source = to.view(torch.uint8), source.view(torch.uint8)
    to.copy_(source)


def _entry(layer: LayerExperts, expert: int) -> str:
    return f"[{expert}]" if layer.stacked_names else ""


class BadValuesError(CheckpointError):
    """Values that a check refused; ``tensor``, ``expert`` and ``projection``: the first one's name and whose it is."""

    def __init__(self, tensor: str, count: int, total: int, *, expert: int = 0, projection: str = "") -> None:
        super().__init__(f"{tensor} holds values that are refused ({count} of {total} tensors do)")
        self.tensor = tensor
        self.count = count
        self.expert = expert
        self.projection = projection
