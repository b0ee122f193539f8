"""Checkpoint formats: what an adapter implements.

An adapter knows one way of storing quantised experts.  It looks at a layer once (:meth:`CheckpointFormat.resolve`),
and says how the layer lies, as an :class:`ExpertLayout` that loads it, or why the layer is not of its format.  What is
loaded are the scheme's canonical weights; an adapter never meets a backend.  It decides from the tensors as much as
from config.json, since tools write configs that don't fit their own files.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.reading_threads import in_threads
from moe_core.checkpoint.staging import PIECE_BYTES, bytes_of, is_staged, places, staging
from moe_core.checkpoint.statements import tool
from moe_core.config import FusedMoEConfig
from moe_core.errors import CheckpointError
from moe_core.quant_key import QuantKey
from moe_core.weights import MoEWeights

#: of experts that are read at a time, as stored: small enough for a processor's cache, where values are looked at
GROUP_BYTES = 8 << 20
#: the same on the way to a GPU
GPU_GROUP_BYTES = PIECE_BYTES
#: bytes at whose multiples each projection's tensors begin, so that they can be taken for any type
_ALIGNED = 64


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
) -> Tensor:
    """Tensors of ``projections``, one below the other, for each expert: ``[len(experts), rows, ...]`` on ``device``.

    - ``dtype``: converted to it; default: as stored
    - ``arrange``: stored tensors of some experts, ``[n, ...]``, on ``device`` -> what is kept, ``[n, rows, ...]``
    - ``check``: what is kept of some experts, on ``device`` -> bool scalar there, True if it must be refused; all are
      looked at once, so a GPU is waited for once.  The error of a refused one is the caller's: CheckpointError with its
      name.

    Several experts are read at a time, into memory from which a GPU copies by itself.
    """
    if not experts:
        raise CheckpointError(f"{layer.prefix}: no expert was asked for")
    target = torch.device(device)
    on_gpu = is_staged(target)
    stored = [_dtype(layer, projection, suffix) for projection in projections]
    shapes = [layer.shape(projection, suffix) for projection in projections]
    sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(shapes, stored, strict=True)]
    each = sum(sizes)
    if arrange is None and {*stored} != {dtype or stored[0]}:
        arrange = _as_stored
    many = max(1, (GPU_GROUP_BYTES if on_gpu else GROUP_BYTES) // max(1, each))
    groups = [slice(at, min(at + many, len(experts))) for at in range(0, len(experts), many)]
    out = _Result(len(experts), target)

    # an expert's lie side by side where all are of one shape and type: one tensor, with which less is to be done
    alike = len({*zip(shapes, stored, strict=True)}) == 1

    def read(slots: slice, room: memoryview, begins: Sequence[int], steps: Sequence[int]) -> None:
        """Reads some experts' tensors to where each projection's first one begins, and the next ones ``steps`` on."""
        some = experts[slots]
        spots = zip(projections, begins, steps, sizes, strict=True)
        layer.read_all(
            some, {(name, suffix): places(room, begin, step, size, len(some)) for name, begin, step, size in spots}
        )

    def read_by_expert(slots: slice, room: memoryview) -> None:
        read(slots, room, list(itertools.accumulate(sizes[:-1], initial=0)), [each] * len(sizes))

    def fill_as_it_lies(slots: slice) -> None:
        begin, end = slots.start * each, slots.stop * each
        if on_gpu:
            piece = staging(end - begin, target)
            read_by_expert(slots, piece.room)
            piece.copy_to(out.flat[begin:end])
        else:
            read_by_expert(slots, out.room[begin:end])

    def fill_arranged(slots: slice, arrange: Callable[[Tensor], Tensor]) -> None:
        count = slots.stop - slots.start
        if alike:
            piece = staging(count * each, target)
            read_by_expert(slots, piece.room)
            here = piece.on(target, count * each).view(stored[0])
            part = arrange(here.view(count * len(sizes), *shapes[0]))
            out.allocate([tuple(part.shape[1:])] * len(sizes), dtype or part.dtype)
            _copy_bytes(out.tensor[slots].view(part.shape), part)
            return
        begins = [0, *itertools.accumulate(-(-size * count // _ALIGNED) * _ALIGNED for size in sizes)]
        piece = staging(begins[-1], target)
        read(slots, piece.room, begins[:-1], sizes)
        here = piece.on(target, begins[-1])
        parts = [
            arrange(here[begin : begin + size * count].view(kind).view(count, *shape))
            for begin, size, shape, kind in zip(begins, sizes, shapes, stored, strict=False)
        ]
        out.allocate([tuple(part.shape[1:]) for part in parts], dtype or parts[0].dtype)
        for part, begin, end in zip(parts, out.starts, out.starts[1:], strict=False):
            _copy_bytes(out.tensor[slots, begin:end], part)

    if arrange is None:
        out.allocate(shapes, stored[0])
        fill = fill_as_it_lies
    else:
        fill = functools.partial(fill_arranged, arrange=arrange)

    def filled(number: int) -> Tensor | None:
        """Puts some experts into their places; what ``check`` says of them, while a CPU has them at hand."""
        fill(groups[number])
        return None if check is None or on_gpu else check(out.tensor[groups[number]])

    flags = [flag for flag in in_threads(filled, len(groups), each * len(experts)) if flag is not None]
    if check is not None and on_gpu:
        flags = [check(out.tensor)]
    if check is not None and bool(torch.stack(flags).any()):
        every = [(slot, number) for slot in range(len(experts)) for number in range(len(projections))]
        refused = [
            (slot, number)
            for slot, number in every
            if bool(check(out.tensor[slot : slot + 1, out.starts[number] : out.starts[number + 1]]))
        ]
        expert, projection = experts[refused[0][0]], projections[refused[0][1]]
        name = layer.name(expert, projection, suffix) + _entry(layer, expert)
        raise BadValuesError(name, len(refused), len(every), expert=expert, projection=projection)
    return out.tensor


class _Result:
    """What :func:`load_stacked` returns, once its shape is known.

    ``starts``: of each projection's rows, and their end; of what lies as it is stored, ``flat``: the bytes of a tensor
    on a GPU, ``room``: those of one on the CPU, to be written.
    """

    tensor: Tensor
    starts: list[int]
    flat: Tensor
    room: memoryview

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self._device = device
        self._lock = threading.Lock()

    def allocate(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        """Memory for each projection's ``shapes``, by the first who knows them."""
        with self._lock:
            if hasattr(self, "tensor"):
                return
            self.starts = list(itertools.accumulate((shape[0] for shape in shapes), initial=0))
            shape = (self._count, self.starts[-1], *shapes[0][1:])
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            if self._device.type == "cpu":
                self.room = bytes_of(tensor)
            self.flat = tensor.view(-1).view(torch.uint8)
            self.tensor = tensor


def _copy_bytes(to: Tensor, source: Tensor) -> None:
    """By bytes where types of one byte agree: torch copies rows that lie apart in the types that it computes with."""
    if to.dtype == source.dtype and to.dtype.itemsize == 1:
        to, source = to.view(torch.uint8), source.view(torch.uint8)
    to.copy_(source)


def _as_stored(stored: Tensor) -> Tensor:
    return stored


def _dtype(layer: LayerExperts, projection: str, suffix: str) -> torch.dtype:
    dtype = layer.dtype(projection, suffix)
    if dtype is None:
        name, kind = layer.name(0, projection, suffix), layer.stored_dtype(projection, suffix)
        raise CheckpointError(f"{name} has the type {kind}, which torch has not")
    return dtype


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
