"""Read one safetensors file: its header and its tensors.

The header is checked before anything is allocated. The safetensors library is not used, for two reasons: errors about
a header can be precise, and the library maps the data into memory (see :mod:`moe_core._support.open_file`).
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
    """Header entry of one tensor.

    Attributes:
        name: Name of the tensor.
        file: The file that stores it.
        dtype: The dtype, or None if torch does not have it.
        shape: The shape.
        stored_dtype: The dtype as safetensors spells it.
    """

    name: str
    file: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    stored_dtype: str

    def __str__(self) -> str:
        return f"{self.stored_dtype} {list(self.shape)}"


#: One read of a batch: name of the tensor, entry of its first dimension (None for all), buffer for the bytes.
Part = tuple[str, int | None, memoryview]
#: One read of a byte range: name of the tensor, offset of the first byte in the tensor, buffer of the range's size.
Span = tuple[str, int, memoryview]


_OFFSET = operator.itemgetter(1)


class SafetensorsFile:
    """An open safetensors file, whose tensors are copied into newly allocated memory.

    Attributes:
        path: The file.
        kinds: (dtype, shape) of each tensor, by name.
    """

    def __init__(self, path: Path, state: FileState | None = None) -> None:
        """Open the file and read its header.

        Args:
            path: The file.
            state: State of the file when the folder was opened; default the current one.

        Raises:
            CheckpointError: The file has changed since ``state``, or its header is invalid.
        """
        self.path = path
        self._file: OpenFile | None = OpenFile(path, state)
        self._state = self._file.state
        #: dtype and shape of each tensor, by name.
        self.kinds, self._data = read_header(self._file)

    def info(self, name: str) -> TensorInfo:
        """Return the header entry of a tensor.

        Args:
            name: Name of a tensor of this file.

        Returns:
            Its dtype and shape.
        """
        kind, shape = self.kinds[name]
        return TensorInfo(name, self.path, DTYPES.get(kind), shape, kind)

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Read a whole tensor; for a GPU, in pieces through pinned staging buffers.

        Args:
            name: Name of a tensor of this file.
            device: Where the tensor is allocated.

        Returns:
            A new tensor, exactly as stored.

        Raises:
            CheckpointError: torch does not have the dtype, there is not enough memory, or the file has changed.
        """
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
        # The caller may use the tensor on another thread with another stream.
        torch.cuda.current_stream(target).synchronize()
        return out

    def part(self, name: str, index: int) -> Tensor:
        """Read one entry of a tensor's first dimension without reading the others.

        Args:
            name: Name of a tensor of this file.
            index: Index into the first dimension.

        Returns:
            A new tensor on the CPU.

        Raises:
            CheckpointError: torch does not have the dtype, there is not enough memory, or the file has changed.
        """
        out = self._empty(name, self.kinds[name][1][1:])
        self.read_into(name, out, index)
        return out

    def read_into(self, name: str, out: Tensor, index: int | None = None) -> None:
        """Read a tensor, or one entry of its first dimension, into an existing tensor.

        Args:
            name: Name of a tensor of this file.
            out: Contiguous CPU tensor of the stored dtype and shape.
            index: Index into the first dimension; default: the whole tensor.
        """
        self.read_all([(name, index, bytes_of(out))])

    def read_all(self, parts: Iterable[Part]) -> None:
        """Read several tensors, or entries of their first dimension.

        Args:
            parts: (name, entry or None for all, buffer of exactly that size) of each read.
        """
        self.read_spans((name, 0 if index is None else index * len(buffer), buffer) for name, index, buffer in parts)

    def read_spans(self, spans: Iterable[Span]) -> None:
        """Read byte ranges of tensors, in file order.

        Args:
            spans: (name, offset of the first byte in the tensor, buffer) of each read. The range must be within the
                tensor.
        """
        # A local reference, since another thread may release the file during this read.
        file = self._file or OpenFile(self.path, self._state)
        data = self._data
        placed = [(buffer, data[name] + offset) for name, offset, buffer in spans if len(buffer)]
        # In file order, so that adjacent ranges are read at once.
        placed.sort(key=_OFFSET)
        file.read_all(placed)

    def hold(self) -> None:
        """Keep the file open for the following reads."""
        if self._file is None:
            self._file = OpenFile(self.path, self._state)

    def release(self) -> None:
        """Close the file; each following read opens it again."""
        self._file = None

    def _empty(self, name: str, shape: tuple[int, ...], device: torch.device | None = None) -> Tensor:
        stored = self.kinds[name][0]
        dtype = DTYPES.get(stored)
        if dtype is None:
            raise CheckpointError(f"{name} in {self.path} has the type {stored}, which torch does not support")
        try:
            return torch.empty(shape, dtype=dtype, device=device or "cpu")
        except RuntimeError as error:  # out of memory
            raise CheckpointError(f"{name} can't be read from {self.path}: {error}") from None
