"""Read a tensor-parallel shard: some columns of a layer's intermediate size.

Each column of the intermediate size is a row of gate and up and a column of down. A shard may be contiguous or strided
in the file. One entry of a stored tensor may cover several columns (packed words, blocks that share a scale).
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

#: Pieces with smaller gaps, in bytes, are read together, because disks and page caches deliver whole pages.
GAP_BYTES = 4096
#: Bytes per read when pieces are read together.
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class StoredAxis:
    """Dimension of a stored tensor that corresponds to rows or columns of the matrix.

    Attributes:
        dim: Index of the dimension in one expert's tensor.
        unit: Number of rows (or columns) per entry.
        separate: For fused gate and up, whether up starts at a new entry, so that gate's last entry may cover fewer
            rows. Otherwise entries are counted over all rows, and one entry may cover rows of both.
    """

    dim: int
    unit: int = 1
    separate: bool = False

    def straddles(self, size: int) -> bool:
        """Return whether an entry covers rows of both gate and up, if up follows gate.

        Args:
            size: Number of gate rows.

        Returns:
            True if gate cannot be read without rows of up.
        """
        return not self.separate and size % self.unit != 0


#: (axis of the matrix's rows, axis of its columns); None if the tensor does not have that dimension.
Axes = tuple[StoredAxis | None, StoredAxis | None]


@dataclass(frozen=True)
class _Slice:
    """The ranges (begin, end) of entries to read along one dimension."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


@dataclass(frozen=True, eq=False, repr=False)
class SlicedExperts(LayerExperts):
    """A range of columns of a layer's intermediate size, presented as if the file had no others.

    Shapes and tensors are those of the range. Names, dtypes and the tool's config are those of the whole layer.
    """

    _slices: Mapping[Key, _Slice] = field(default_factory=dict)

    @staticmethod
    def of(
        layer: LayerExperts, axes: Mapping[Key, Axes], begin: int, end: int, size: int, *, interleaved: bool
    ) -> SlicedExperts:
        """Restrict a layer to a range of columns of its intermediate size.

        Args:
            layer: The whole layer.
            axes: Axes of the rows and columns, by projection and suffix.
            begin: First column; a multiple of :func:`column_unit`.
            end: End of the columns; a multiple of :func:`column_unit`, or ``size``.
            size: The intermediate size of the whole layer.
            interleaved: Whether gate and up rows are interleaved in gate_up.

        Returns:
            The restricted layer.

        Raises:
            CheckpointError: An entry covers rows of both gate and up, so that they cannot be read separately.
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
                        f"{layer.name(0, projection, suffix)} packs {axis.unit} rows per element, but gate and up have "
                        f"{size} rows each; expected a multiple of {axis.unit}"
                    )
                each = -(-size // axis.unit)
                ranges = ((first, last), (each + first, each + last))
                if interleaved:  # entries count rows of both gate and up
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
        """Read several rows at once, including gaps, and copy only the needed pieces."""
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
    """Return the axis of the intermediate size: rows of gate and up, columns of down.

    Args:
        projection: The projection.
        axes: Axes of its rows and columns.

    Returns:
        The axis, or None if the tensor does not have that dimension.
    """
    return axes[1] if projection == "down" else axes[0]


def column_unit(layer: LayerExperts, axes: Mapping[Key, Axes], *, interleaved: bool) -> int | None:
    """Return the granularity at which columns of the intermediate size can be read.

    Args:
        layer: The whole layer.
        axes: Axes of the rows and columns, by projection and suffix.
        interleaved: Whether gate and up rows are interleaved in gate_up.

    Returns:
        Smallest number of columns such that no stored entry is split at its multiples. None if the layer must be read
        as a whole because an entry covers rows of both gate and up.
    """
    found = [(key, axis) for key, both in axes.items() if (axis := along(key[0], both)) is not None]
    if not interleaved:
        # Shapes with too few dimensions are skipped here; reading the layer refuses them.
        fused = [(axis, layer.shape(*key)[axis.dim :][:1]) for key, axis in found if key[0] == "gate_up"]
        # Number of gate and up rows. The last entry of a tensor may be padded, so the smallest count is the exact one:
        # some tensor has one row per entry.
        rows = min((axis.unit * count for axis, counts in fused for count in counts), default=0)
        if any(axis.straddles(rows // 2) for axis, _ in fused):
            return None
    return math.lcm(*(axis.unit for _, axis in found))


def _apart(
    name: str, start: int, to: memoryview, rows: int, pitch: int, pieces: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, int, memoryview]]:
    """Yield a separate read for each piece of each row."""
    at = 0
    for row in range(rows):
        for begin, end in pieces:
            yield name, start + row * pitch + begin, to[at : at + end - begin]
            at += end - begin
