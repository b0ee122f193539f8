"""One safetensors file: its header, checked before anything is allocated, and its tensors.

Read here and not through the library: to say precisely what is wrong with a header, and because the library maps the
data (:mod:`moe_core._support.open_file`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_core._support.open_file import FileState, OpenFile
from moe_core.checkpoint.files.safetensors_header import DTYPES, read_header
from moe_core.checkpoint.files.staging import PIECE_BYTES, bytes_of, staging
from moe_core.errors import CheckpointError


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


#: what is read at once with others: a tensor's name, the entry of its first dimension (None: all), its bytes' place
Part = tuple[str, int | None, memoryview]
#: the same of any bytes: a tensor's name, the first of its bytes, as many as their place has
Span = tuple[str, int, memoryview]


_OFFSET = operator.itemgetter(1)


class SafetensorsFile:
    """An opened file; its tensors are read one by one, into memory of their own."""

    def __init__(self, path: Path, state: FileState | None = None) -> None:
        """``state``: what the file had when the folder was looked at; CheckpointError where it has changed."""
        self.path = path
        self._file: OpenFile | None = OpenFile(path, state)
        self._state = self._file.state
        #: dtype and shape of each tensor, by name
        self.kinds, self._data = read_header(self._file)

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
            piece.copy_to([flat[at : at + count]])
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
