"""One safetensors file: its header, checked before anything is allocated, and its tensors.

Read here and not through the library: to say precisely what is wrong with a header, and because the library maps the
data (:mod:`moe_core.checkpoint.open_file`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from moe_core.checkpoint.open_file import FileState, OpenFile
from moe_core.checkpoint.staging import PIECE_BYTES, bytes_of, staging
from moe_core.checkpoint.strict_json import parse_object
from moe_core.errors import CheckpointError

#: the library's own limit
MAX_HEADER_BYTES = 100_000_000

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor.  ``dtype`` None: a type that torch has not, ``stored_dtype`` is its name."""

    name: str
    file: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    stored_dtype: str

    def __str__(self) -> str:
        return f"{self.stored_dtype} {list(self.shape)}"


#: dtype as a header spells it, and shape: one object for all tensors of a file that are alike
Kind = tuple[str, tuple[int, ...]]

#: what is read at once with others: a tensor's name, the entry of its first dimension (None: all), its bytes' place
Part = tuple[str, int | None, memoryview]
#: the same of any bytes: a tensor's name, the first of its bytes, as many as their place has
Span = tuple[str, int, memoryview]


_OFFSET = operator.itemgetter(1)
_INTEGERS = {int}


class SafetensorsFile:
    """An opened file; its tensors are read one by one, into memory of their own."""

    def __init__(self, path: Path, state: FileState | None = None) -> None:
        """``state``: what the file had when the folder was looked at; CheckpointError where it has changed."""
        self.path = path
        self._file: OpenFile | None = OpenFile(path, state)
        self._state = self._file.state
        #: dtype and shape of each tensor, by name
        self.kinds, self._data = _read_header(self._file)

    def info(self, name: str) -> TensorInfo:
        """What the header says of a tensor that the file has."""
        kind, shape = self.kinds[name]
        return TensorInfo(name, self.path, DTYPES.get(kind), shape, kind)

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """The whole tensor on ``device``; a GPU copies it, some bytes at a time, from where they are read to."""
        target = torch.device(device)
        if target.type != "cuda":
            out = self._empty(name, self.kinds[name][1])
            self.read_into(name, out)
            return out.to(target)
        out = self._empty(name, self.kinds[name][1], target)
        flat = out.view(-1).view(torch.uint8)
        for at in range(0, len(flat), PIECE_BYTES):
            count = min(PIECE_BYTES, len(flat) - at)
            piece = staging(count, target)
            self.read_spans([(name, at, piece.room[:count])])
            piece.copy_to(flat[at : at + count])
        # another thread's stream may be another one
        torch.cuda.current_stream(target).synchronize()
        return out

    def part(self, name: str, index: int) -> Tensor:
        """Entry ``index`` of the first dimension, without reading the others."""
        out = self._empty(name, self.kinds[name][1][1:])
        self.read_into(name, out, index)
        return out

    def read_into(self, name: str, out: Tensor, index: int | None = None) -> None:
        """Fill ``out``, contiguous, on the CPU and as stored, with the tensor, or with its entry ``index``."""
        self.read_all([(name, index, bytes_of(out))])

    def read_all(self, parts: Iterable[Part]) -> None:
        """Fill each part's buffer, which has its size, with the tensor, or with its entry."""
        self.read_spans((name, 0 if index is None else index * len(buffer), buffer) for name, index, buffer in parts)

    def read_spans(self, spans: Iterable[Span]) -> None:
        """Fill each span's buffer with bytes of the tensor, which has so many."""
        # another thread may release the file meanwhile: this read goes on
        file = self._file or OpenFile(self.path, self._state)
        data = self._data
        placed = [(buffer, data[name] + offset) for name, offset, buffer in spans if len(buffer)]
        # in the order of the file: neighbours are read at once
        placed.sort(key=_OFFSET)
        file.read_all(placed)

    def hold(self) -> None:
        """Keep the file open for what is read from now on."""
        if self._file is None:
            self._file = OpenFile(self.path, self._state)

    def release(self) -> None:
        """Keep it open no longer; each read opens it."""
        self._file = None

    def _empty(self, name: str, shape: tuple[int, ...], device: torch.device | None = None) -> Tensor:
        stored = self.kinds[name][0]
        dtype = DTYPES.get(stored)
        if dtype is None:
            raise CheckpointError(f"{name} in {self.path} has the type {stored}, which torch has not")
        try:
            return torch.empty(shape, dtype=dtype, device=device or "cpu")
        except RuntimeError as error:  # more than there is
            raise CheckpointError(f"{name} can't be read from {self.path}: {error}") from None


def _read_header(file: OpenFile) -> tuple[dict[str, Kind], dict[str, int]]:
    """What the header says of each tensor, and where in the file its data begin."""
    path, size = file.path, file.state.size
    if size < 8:
        raise CheckpointError(
            f"{path} is truncated: it has {size} bytes, a safetensors file begins with 8 of header size"
        )
    length = int.from_bytes(file.read(0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is no safetensors file: its header claims {length} bytes, at most {MAX_HEADER_BYTES} are read"
        )
    if length > size - 8:
        raise CheckpointError(f"{path} is truncated: its header claims {length} bytes, {size - 8} are there")
    header = parse_object(file.read(8, length), f"the header of {path}")
    header.pop("__metadata__", None)
    # a model has 100,000 tensors of a dozen kinds: no object of its own is kept for one
    kinds: dict[str, Kind] = {}
    known: dict[Kind, Kind] = {}
    extents: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        kind, begin, end = _parse(name, entry, path)
        kinds[name] = known.setdefault(kind, kind)
        extents.append((begin, end, name))
    extents.sort()
    _check_extents(extents, kinds, path, size - 8 - length)
    return kinds, {name: 8 + length + begin for begin, _, name in extents}


def _parse(name: str, entry: object, path: Path) -> tuple[Kind, int, int]:
    """Kind, begin and end of the tensor ``name``."""
    where = "the header's entry of"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: {where} {name[:200]!r} is a {type(entry).__name__}, expected an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise CheckpointError(f"{path}: {where} {name[:200]!r} has dtype {_short(dtype)}, expected a name")
    if not _are_sizes(shape):
        raise CheckpointError(f"{path}: {where} {name[:200]!r} has shape {_short(shape)}, expected a list of sizes")
    if not (_are_sizes(offsets) and len(offsets) == 2):
        raise CheckpointError(
            f"{path}: {where} {name[:200]!r} has data_offsets {_short(offsets)}, expected [begin, end]"
        )
    return (dtype, tuple(shape)), offsets[0], offsets[1]


def _check_extents(
    extents: Iterable[tuple[int, int, str]], kinds: Mapping[str, Kind], path: Path, data_bytes: int
) -> None:
    """Every tensor has the bytes that its shape needs, one after the other, and the file holds them all."""
    end = 0
    sizes: dict[Kind, int | None] = {}
    for begin, stop, name in extents:
        kind = kinds[name]
        if begin != end or stop < begin:
            raise CheckpointError(
                f"{path}: {name!r} lies at bytes {begin} to {stop} of the data, expected to begin at {end}"
            )
        end = stop
        if kind not in sizes:
            dtype = DTYPES.get(kind[0])
            sizes[kind] = None if dtype is None else math.prod(kind[1]) * dtype.itemsize
        needed = sizes[kind]
        if needed is not None and needed != stop - begin:
            raise CheckpointError(
                f"{path}: {name!r} is {kind[0]} {list(kind[1])}, which is {needed} bytes; "
                f"the header gives it {stop - begin}"
            )
        if end > data_bytes:
            raise CheckpointError(
                f"{path} is truncated: {name!r} ends at byte {end} of the data, the file holds {data_bytes}"
            )
    if end != data_bytes:
        raise CheckpointError(f"{path} holds {data_bytes} bytes of data, its header accounts for {end}")


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of sizes: more than 2**63 - 1 is none, nor is a bool, which is an int in Python."""
    if not isinstance(values, list) or not {*map(type, values)} <= _INTEGERS:
        return False
    return not values or (min(values) >= 0 and max(values) < 1 << 63)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"
