"""A layer of which only some columns are read: those of a tensor-parallel rank.

Gate and up have a row for each column of the intermediate size, down has a column.  In a file either may be contiguous
or lie apart, and an entry of a tensor may hold several of them (words, blocks that share a scale).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.files.staging import bytes_of, places_of
from moe_core.checkpoint.files.tensor_names import Key
from moe_core.errors import CheckpointError

#: bytes between two pieces below which they are read together: disks and page caches give whole pages
GAP_BYTES = 4096
#: that are read at a time where pieces are read together
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class StoredAxis:
    """The dimension ``dim`` of one expert's tensor as stored whose entries hold ``unit`` rows (or columns) each.

    ``separate``: where gate and up are one matrix, either begins with an entry of its own, though gate's last one may
    hold fewer rows; otherwise entries are counted over all rows, and one may hold rows of both.
    """

    dim: int
    unit: int = 1
    separate: bool = False

    def straddles(self, size: int) -> bool:
        """Whether an entry holds rows of both, where gate has ``size`` rows and up's come after them."""
        return not self.separate and size % self.unit != 0


#: (that of the matrix's rows, that of its columns); None where a tensor has none
Axes = tuple[StoredAxis | None, StoredAxis | None]


@dataclass(frozen=True)
class _Slice:
    """Entries ``ranges`` (begin, end) of the dimension ``dim``, which are kept."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


@dataclass(frozen=True, eq=False, repr=False)
class SlicedExperts(LayerExperts):
    """The columns ``begin`` to ``end`` of a layer of intermediate ``size``, as if the file held no others.

    Shapes and tensors are those of the part; names, dtypes and what a tool's config says are the whole layer's.
    """

    _slices: Mapping[Key, _Slice] = field(default_factory=dict)

    @staticmethod
    def of(
        layer: LayerExperts, axes: Mapping[Key, Axes], begin: int, end: int, size: int, *, interleaved: bool
    ) -> SlicedExperts:
        """``axes`` of each projection and suffix; ``interleaved``: rows of gate_up are theirs in turns.

        ``begin`` and ``end`` are multiples of :func:`column_unit`, or ``size``.  Raises CheckpointError where an entry
        holds rows of gate and of up, so that neither can be read by itself.
        """
        slices: dict[Key, _Slice] = {}
        for (projection, suffix), both in axes.items():
            axis = along(projection, both)
            if axis is None:
                continue
            first, last = begin // axis.unit, -(-end // axis.unit)
            ranges: tuple[tuple[int, int], ...] = ((first, last),)
            if projection == "gate_up":
                if not interleaved and axis.straddles(size):
                    raise CheckpointError(
                        f"{layer.name(0, projection, suffix)} holds {axis.unit} rows in an entry, and gate and up have "
                        f"{size} each: expected a multiple of {axis.unit}, or to be read whole and cut"
                    )
                each = -(-size // axis.unit)
                ranges = ((first, last), (each + first, each + last))
                if interleaved:  # entries are counted over the rows of both
                    ranges = ((2 * begin // axis.unit, -(-2 * end // axis.unit)),)
            slices[projection, suffix] = _Slice(axis.dim, ranges)
        own = {item.name: getattr(layer, item.name) for item in fields(LayerExperts)}
        return SlicedExperts(**own, _slices=slices)

    def shape(self, projection: str, suffix: str) -> tuple[int, ...]:
        shape = super().shape(projection, suffix)
        part = self._slices.get((projection, suffix))
        return shape if part is None else (*shape[: part.dim], part.count, *shape[part.dim + 1 :])

    def tensor(self, expert: int, projection: str, suffix: str) -> Tensor:
        return self.stacked(projection, suffix, (expert,))[0]

    def read_into(self, expert: int, projection: str, suffix: str, out: Tensor) -> None:
        self.read_all((expert,), {(projection, suffix): places_of(out[None])})

    def read_all(self, experts: Sequence[int], outs: Mapping[Key, Sequence[memoryview]]) -> None:
        whole: dict[Key, Sequence[memoryview]] = {}
        for key, places in outs.items():
            part = self._slices.get(key)
            if part is None:
                whole[key] = places
            else:
                self._read_part(experts, *key, part, places)
        super().read_all(experts, whole)

    def _read_part(
        self, experts: Sequence[int], projection: str, suffix: str, part: _Slice, places: Sequence[memoryview]
    ) -> None:
        info = self._info(projection, suffix)
        whole = LayerExperts.shape(self, projection, suffix)
        entry = math.prod(whole[part.dim + 1 :]) * (1 if info.dtype is None else info.dtype.itemsize)
        pieces = [(begin * entry, end * entry) for begin, end in part.ranges]
        rows, pitch = math.prod(whole[: part.dim]), whole[part.dim] * entry
        for to, expert in zip(places, experts, strict=bool(places)):
            start = expert * rows * pitch if self._per_expert(info) else 0
            name = self.name(expert, projection, suffix)
            if rows == 1 or pitch - part.count * entry >= GAP_BYTES * len(pieces):
                self.checkpoint.read_spans(_apart(name, start, to, rows, pitch, pieces))
            else:
                self._read_together(name, start, to, rows, pitch, pieces)

    def _read_together(
        self, name: str, start: int, to: memoryview, rows: int, pitch: int, pieces: Sequence[tuple[int, int]]
    ) -> None:
        """Rows at a time, from the first byte that is kept to the last; what lies between is left behind."""
        low, high = pieces[0][0], pieces[-1][1]
        kept = torch.frombuffer(to, dtype=torch.uint8).view(rows, -1)
        step = max(1, CHUNK_BYTES // pitch)
        scratch = torch.empty(step, pitch, dtype=torch.uint8, device="cpu")
        room = bytes_of(scratch)
        for row in range(0, rows, step):
            count = min(step, rows - row)
            self.checkpoint.read_spans([(name, start + row * pitch + low, room[low : (count - 1) * pitch + high])])
            at = 0
            for begin, end in pieces:
                kept[row : row + count, at : at + end - begin] = scratch[:count, begin:end]
                at += end - begin

    def __repr__(self) -> str:
        return f"SlicedExperts({self.prefix!r}, {self.num_experts} experts)"


def along(projection: str, axes: Axes) -> StoredAxis | None:
    """The axis of the intermediate size: rows of gate and up, columns of down."""
    return axes[1] if projection == "down" else axes[0]


def column_unit(layer: LayerExperts, axes: Mapping[Key, Axes], *, interleaved: bool) -> int | None:
    """Columns of the intermediate size that no entry of a stored tensor parts.

    None where the layer must be read whole: where entries of one tensor hold rows of gate and of up.
    """
    found = [(key, axis) for key, both in axes.items() if (axis := along(key[0], both)) is not None]
    if not interleaved:
        # shapes with too few dimensions are refused where the layer is read
        fused = [(axis, layer.shape(*key)[axis.dim :][:1]) for key, axis in found if key[0] == "gate_up"]
        # of gate and up; the last entry may have room for more rows than there are, but some tensor has one in each
        rows = min((axis.unit * count for axis, counts in fused for count in counts), default=0)
        if any(axis.straddles(rows // 2) for axis, _ in fused):
            return None
    return math.lcm(*(axis.unit for _, axis in found))


def _apart(
    name: str, start: int, to: memoryview, rows: int, pitch: int, pieces: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, int, memoryview]]:
    """Each piece of each row by itself."""
    at = 0
    for row in range(rows):
        for begin, end in pieces:
            yield name, start + row * pitch + begin, to[at : at + end - begin]
            at += end - begin
