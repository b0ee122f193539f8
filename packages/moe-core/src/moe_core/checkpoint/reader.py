"""Read an untrusted checkpoint folder: config.json and safetensors files.

Only safetensors files are read, never pickles. Headers are checked before anything is allocated. Tensors are copied
one by one into newly allocated memory. A file that changes after opening raises an error instead of changing a result.
All problems raise :class:`moe_core.errors.CheckpointError`, which names the file and the tensor.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from moe_core._support.atomic_write import as_path
from moe_core._support.open_file import FileState
from moe_core._support.strict_json import MAX_INDEX_BYTES, load_object
from moe_core.checkpoint.config.families import DEFAULT_STACKS
from moe_core.checkpoint.config.statements import read_quantization
from moe_core.checkpoint.files.safetensors_file import Part, SafetensorsFile, Span, TensorInfo
from moe_core.checkpoint.files.safetensors_header import Kind
from moe_core.checkpoint.files.shards import (
    SINGLE_NAME,
    check_folder,
    check_shards,
    index_file,
    shard_path,
    unindexed_files,
)
from moe_core.checkpoint.files.tensor_names import ExpertNames, LayerNames, by_layer
from moe_core.errors import CheckpointError, ConfigError, check_instance

#: Maximum number of files kept open; a model has hundreds, but a layer's tensors are stored in a few.
MOST_OPEN = 16

_LOCK = threading.Lock()
_NAME = operator.itemgetter(0)

P = TypeVar("P", Part, Span)
T = TypeVar("T")


class Checkpoint:
    """An open checkpoint folder.

    No tensor data is read until :meth:`tensor`. Reading is thread-safe.

    Attributes:
        path: The folder.
        config: Content of config.json.
        quantization: Quantization config merged from the folder's JSON files; empty if there are none.
    """

    def __init__(
        self, path: Path, config: Mapping[str, Any], quantization: Mapping[str, Any], files: Mapping[str, Path]
    ) -> None:
        self.path = path
        self.config = config
        self.quantization = quantization
        self._files = files
        # A snapshot of the state of all files, against which later changes are detected.
        self._states = {file: FileState.of(file) for file in sorted(set(files.values()))}
        self._opened: dict[Path, SafetensorsFile] = {}
        self._recent: dict[Path, None] = {}
        self._readers = 0
        self._layers: dict[str, dict[int, LayerNames]] = {}
        self._found: dict[object, object] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open a folder with config.json and model.safetensors, or shards with an index.

        An index takes precedence over other safetensors files of the folder. Without an index, model.safetensors is
        read if it exists, else ``model*.safetensors``, else all ``*.safetensors``.

        Args:
            path: The checkpoint folder.

        Returns:
            The open checkpoint.

        Raises:
            CheckpointError: The folder or a file in it is missing, unreadable or invalid.
            ConfigError: ``path`` is empty or not a path.
        """
        folder = as_path("path", path)
        if not str(path):
            raise ConfigError(f"path is {path!r}, expected a checkpoint's folder")
        try:
            return cls._open(folder)
        except OSError as error:  # e.g. no permission to list the folder, or a name that is too long
            raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from None

    @classmethod
    def _open(cls, folder: Path) -> Checkpoint:
        check_folder(folder)
        config = load_object(folder / "config.json")
        quantization = read_quantization(folder, config)
        index = index_file(folder)
        if index is not None:
            return cls(folder, config, quantization, _indexed(folder, index))
        opened = [SafetensorsFile(file) for file in unindexed_files(folder)]
        files: dict[str, Path] = {}
        for file in opened:
            for name in file.kinds:
                if name in files:
                    raise CheckpointError(
                        f"{name} is in two files of {folder}: {files[name].name} and {file.path.name}"
                    )
                files[name] = file.path
            file.release()
        checkpoint = cls(folder, config, quantization, files)
        checkpoint._opened = {file.path: file for file in opened}
        return checkpoint

    @property
    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._files.keys()

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The indices of the layers with experts, ascending; empty for a dense model."""
        return tuple(self.expert_tensors())

    def expert_tensors(self, stack: str | None = None) -> Mapping[int, LayerNames]:
        """Return the names of expert tensors by layer.

        Args:
            stack: First component of the tensor names of one stack of layers, for models with several stacks
                (Qwen3-Omni's thinker and talker). Default: the family's default stack (the thinker for Qwen3-Omni).

        Returns:
            Names of expert tensors by layer index, ascending.

        Raises:
            CheckpointError: A layer has two MoE blocks, ``stack`` has no experts, or a model has several stacks and
                ``stack`` is needed to choose one.
        """
        check_instance("stack", stack, str, type(None))
        if stack is None and len(self._stacks) > 1:
            kind = self.config.get("model_type")
            stack = DEFAULT_STACKS.get(kind) if isinstance(kind, str) else None
            if stack not in self._stacks:
                raise CheckpointError(
                    f"{self.path} has experts in several stacks of layers: pass stack (--stack), one of "
                    f"{' or '.join(sorted(self._stacks))}"
                )
        if stack is None:
            stack = next(iter(self._stacks), "")
        elif stack not in self._stacks:
            there = ", ".join(self._stacks) or "none"
            raise CheckpointError(f"{self.path}: stack {stack!r} has no experts; expected one of {there}")
        if stack not in self._layers:
            self._layers[stack] = by_layer(self._stacks.get(stack, {}).values(), self.path)
        return self._layers[stack]

    @property
    def stacks(self) -> tuple[str, ...]:
        """The first components of expert tensor names: one for each stack of layers with experts."""
        return tuple(self._stacks)

    @property
    def _stacks(self) -> Mapping[str, Mapping[str, LayerNames]]:
        return self._experts.stacks

    @functools.cached_property
    def _experts(self) -> ExpertNames:
        return ExpertNames(self.names)

    @property
    def no_projections(self) -> Iterable[str]:
        """The names of tensors under an experts prefix that do not belong to a projection."""
        return self._experts.others

    def once(self, key: object, find: Callable[[], T]) -> T:
        """Return the cached result of ``find()`` for ``key``.

        It ensures, for example, that a layer's names are scanned only once.

        Args:
            key: Hashable cache key.
            find: Computes the result; called on the first request for ``key`` only.

        Returns:
            The result of the first call.
        """
        if key not in self._found:
            self._found[key] = find()
        return cast("T", self._found[key])

    @property
    def files(self) -> frozenset[Path]:
        """The safetensors files that hold the tensors."""
        return frozenset(self._files.values())

    @property
    def nbytes(self) -> int:
        """Total size of all files in bytes, including headers."""
        return sum(state.size for state in self._states.values())

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def left_out(self, wanted: Callable[[str], bool]) -> str:
        """Return a hint for errors about missing tensors: an ignored file that contains one.

        A file is ignored if the index does not list it, or if it is stored next to model.safetensors.

        Args:
            wanted: Whether a tensor name is one of the missing ones.

        Returns:
            A clause that starts with "; ", or "" if no ignored file contains a ``wanted`` tensor.
        """
        for path in sorted(self.path.glob("*.safetensors")):
            if path in self.files:
                continue
            try:
                names = SafetensorsFile(path).kinds
            except CheckpointError:  # an ignored file need not be valid
                continue
            found = next((name for name in names if name not in self and wanted(name)), None)
            if found is None:
                continue
            index = index_file(self.path)
            why = f"{SINGLE_NAME} alone is read" if index is None else f"{index.name} leaves this file out"
            return f"; {path.name} holds {found}, but {why}: correct or remove {SINGLE_NAME if index is None else 'it'}"
        return ""

    def info(self, name: str) -> TensorInfo:
        """Return the dtype and shape of a tensor from the header of its file.

        Args:
            name: Name of the tensor.

        Returns:
            The tensor's header entry.

        Raises:
            CheckpointError: The checkpoint has no such tensor, or its file is invalid.
        """
        return self._file(name).info(name)

    def first_unlike(self, names: Iterable[str]) -> str | None:
        """Find the first tensor whose dtype or shape differs from those of the first one.

        Args:
            names: Names of tensors.

        Returns:
            The name of the differing tensor, or None if all match.
        """
        path: Path | None = None
        expected: Kind | None = None
        kinds: Mapping[str, Kind] = {}
        for name in names:
            if path is None or self._files.get(name) is not path:
                kinds, path = self._file(name).kinds, self._files[name]
            found = kinds.get(name) or self._file(name).kinds[name]
            if expected is None:
                expected = found
            elif found is not expected and found != expected:
                return name
        return None

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Read a tensor exactly as stored.

        Args:
            name: Name of the tensor.
            device: Where the tensor is allocated.

        Returns:
            A new tensor on ``device``.

        Raises:
            CheckpointError: The checkpoint has no such tensor, its dtype is not supported by torch, or its file is
                invalid or has changed.
        """
        return self._file(name).tensor(name, device)

    def part(self, name: str, index: int) -> Tensor:
        """Read one entry of a tensor's first dimension without reading the others.

        Args:
            name: Name of the tensor.
            index: Index into the first dimension.

        Returns:
            A new tensor on the CPU, exactly as stored.

        Raises:
            CheckpointError: The checkpoint has no such tensor, or the tensor has no such entry.
        """
        self._check_entry(name, index)
        return self._file(name).part(name, index)

    def read_into(self, name: str, out: Tensor, index: int | None = None) -> None:
        """Read a tensor, or one entry of its first dimension, into an existing tensor.

        Args:
            name: Name of the tensor.
            out: Contiguous CPU tensor of the stored dtype and shape.
            index: Index into the first dimension; default: the whole tensor.

        Raises:
            CheckpointError: There is no such tensor or entry, or ``out`` has another dtype or shape.
        """
        info = self.info(name)
        shape = info.shape
        if index is not None:
            self._check_entry(name, index)
            shape = shape[1:]
        if (out.dtype, tuple(out.shape)) != (info.dtype, shape):
            raise CheckpointError(
                f"{name} in {info.file} is {info}, which does not match the destination {out.dtype} {list(out.shape)}"
            )
        self._file(name).read_into(name, out, index)

    def read_all(self, parts: Iterable[Part]) -> None:
        """Read several tensors, or entries of their first dimension, faster than one by one.

        Args:
            parts: (name, entry or None for all, buffer) of each read. Each buffer has exactly the size that follows
                from :meth:`info`.

        Raises:
            CheckpointError: There is no such tensor or entry.
        """
        for found in self._by_file(parts):
            file = self._file(found[0][0])
            if not all(map(file.kinds.__contains__, map(_NAME, found))):
                for name, _, _ in found:
                    self._file(name)
            for name, index, _ in found:
                if index is not None:
                    self._check_entry(name, index)
            file.read_all(found)

    def read_spans(self, spans: Iterable[Span]) -> None:
        """Read byte ranges of tensors.

        Args:
            spans: (name, offset of the first byte in the tensor, buffer) of each read. The range must be within the
                tensor.

        Raises:
            CheckpointError: There is no such tensor.
        """
        for found in self._by_file(spans):
            self._file(found[0][0]).read_spans(found)

    def _by_file(self, parts: Iterable[P]) -> Iterable[list[P]]:
        """Group the parts by the file that stores them."""
        listed = list(parts)
        paths = list(map(self._files.get, map(_NAME, listed)))
        if paths and paths[0] is not None and paths.count(paths[0]) == len(paths):
            return [listed]  # the common case: all parts are in one file
        by_file: dict[Path, list[P]] = {}
        for part, path in zip(listed, paths, strict=True):
            if path is None:
                raise CheckpointError(f"{self.path} has no tensor {part[0]!r}")
            by_file.setdefault(path, []).append(part)
        return by_file.values()

    def _check_entry(self, name: str, index: int) -> None:
        info = self.info(name)
        if not info.shape or not 0 <= index < info.shape[0]:
            raise CheckpointError(f"{name} in {info.file} is {info}, it has no entry {index}")

    def _file(self, name: str) -> SafetensorsFile:
        path = self._files.get(name)
        if path is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        with _LOCK:
            file = self._opened.get(path)
            if file is None:
                file = self._opened[path] = SafetensorsFile(path, self._states[path])
            if path not in self._recent:
                file.hold()
                self._recent[path] = None
                if len(self._recent) > MOST_OPEN:
                    first = next(iter(self._recent))
                    del self._recent[first]
                    self._opened[first].release()
        if name not in file.kinds:
            raise CheckpointError(f"the index of {self.path} says that {path.name} holds {name!r}, but it does not")
        return file

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep files open within the context; close them when the last active context exits.

        Contexts may overlap. A read outside of any context leaves its file open.
        """
        with _LOCK:
            self._readers += 1
        try:
            yield
        finally:
            with _LOCK:
                self._readers -= 1
                if not self._readers:
                    for path in self._recent:
                        self._opened[path].release()
                    self._recent.clear()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r})"


def _indexed(folder: Path, index: Path) -> dict[str, Path]:
    content = load_object(index, most=MAX_INDEX_BYTES)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map from tensors to files")
    shards: dict[str, Path] = {}
    holds: dict[Path, str] = {}
    files: dict[str, Path] = {}
    for name, entry in weight_map.items():
        if not isinstance(entry, str) or entry not in shards:
            path = shard_path(folder, index, name, entry)
            shards[path.name] = path
            holds[path] = name
        files[name] = shards[entry]
    check_shards(folder, index, holds)
    return files
