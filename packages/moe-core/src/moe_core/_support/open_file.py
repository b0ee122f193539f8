"""Positional reads of regular files, without memory mapping.

Reading a mapping of a file that someone truncates ends the process (SIGBUS). A read comes back short instead, which
becomes an error with the file's name. A file is read in the state of the first look (:class:`FileState`), or not at
all.
"""

from __future__ import annotations

import contextlib
import operator
import os
import stat
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_core._support.downloads import LFS_POINTER, LFS_POINTER_BYTES, lfs_hint
from moe_core.errors import CheckpointError

# Without os.preadv, threads take turns in moving the file position.
_POSITION = threading.Lock()
#: Maximum number of buffers per system call (IOV_MAX of Linux, macOS and the BSDs).
_MOST_BUFFERS = 1024
#: Gaps of up to this many bytes between two parts are read along with them. That needs fewer system calls, after each
#: of which a thread waits for the GIL. All threads read gaps into this buffer, whose content is never used.
_GAP = memoryview(bytearray(16 << 10))


@dataclass(frozen=True)
class FileState:
    """Properties of a file that change with its content.

    The inode is not included: user-space file systems can renumber files between two looks.

    Attributes:
        size: Size in bytes.
        mtime_ns: Modification time in nanoseconds.
    """

    size: int
    mtime_ns: int

    @staticmethod
    def of(path: Path) -> FileState:
        """Get the state of a regular file.

        Symbolic links are followed, because download caches consist of them.

        Args:
            path: The file.

        Returns:
            Its state.

        Raises:
            CheckpointError: ``path`` is inaccessible, or a pipe or a device, which could block forever.
        """
        with _named(path):
            return _regular(path, path.stat())


class OpenFile:
    """File that is open for reading until it is garbage collected. Reads are thread-safe.

    Args:
        path: The file.
        expected: Earlier state of the file; None: its current state.

    Raises:
        CheckpointError: The file does not have the expected state. Reads raise it too.
    """

    def __init__(self, path: Path, expected: FileState | None = None) -> None:
        self.path = path
        self.state = FileState.of(path) if expected is None else expected
        with _named(path):
            # Without O_NONBLOCK, a pipe that replaced the file would block until it has a writer.
            flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
            self._descriptor = os.open(path, flags)
        weakref.finalize(self, os.close, self._descriptor)
        self._check_unchanged()
        if len(LFS_POINTER) < self.state.size < LFS_POINTER_BYTES and self.read(0, len(LFS_POINTER)) == LFS_POINTER:
            raise CheckpointError(lfs_hint(path))

    def __reduce__(self) -> tuple[type[OpenFile], tuple[Path, FileState]]:
        # A descriptor is not valid in another process.
        return OpenFile, (self.path, self.state)

    def read(self, offset: int, count: int) -> bytes:
        """Read ``count`` bytes from ``offset``.

        Args:
            offset: Position in the file, in bytes.
            count: Number of bytes.

        Returns:
            The bytes.

        Raises:
            CheckpointError: The file is truncated or has changed.
        """
        buffer = bytearray(count)
        self.read_all([(memoryview(buffer), offset)])
        return bytes(buffer)

    def read_all(self, parts: Iterable[tuple[memoryview, int]]) -> None:
        """Fill several buffers from the file.

        Consecutive parts that are adjacent, or nearly so, are read in one system call. The file is checked for
        changes once for all parts.

        Args:
            parts: Pairs of a byte buffer and its offset in the file.

        Raises:
            CheckpointError: The file is truncated or has changed.
        """
        short: tuple[int, int, int] | None = None
        with _named(self.path):
            for buffers, offset in _runs(parts):
                wanted = sum(map(len, buffers))
                done = _fill(self._descriptor, buffers, offset, wanted)
                if done < wanted:
                    short = wanted, offset, done
                    break
        self._check_unchanged()
        if short is not None:
            raise CheckpointError(
                f"{self.path} is truncated: expected {short[0]} bytes at offset {short[1]}, found {short[2]}"
            )

    def _check_unchanged(self) -> None:
        with _named(self.path):
            found = _regular(self.path, os.fstat(self._descriptor))
        if found == self.state:
            return
        what = "it was written to or replaced"
        if found.size != self.state.size:
            what = f"it had {self.state.size} bytes and has {found.size}"
        raise CheckpointError(f"{self.path} has changed since it was opened: {what}; open the checkpoint again")


def _runs(parts: Iterable[tuple[memoryview, int]]) -> Iterator[tuple[list[memoryview], int]]:
    """Group consecutive parts that are contiguous in the file: buffers and start offset.

    Small gaps between them get buffers too.
    """
    listed = list(parts)
    if not listed:
        return
    # For speed, loop over the few gaps, not over the many parts of a layer.
    buffers, offsets = zip(*listed, strict=True)
    gaps = list(map(operator.sub, offsets[1:], map(operator.add, offsets, map(len, buffers))))
    ends = [at for at, gap in enumerate(gaps, 1) if gap]
    run: list[memoryview] = []
    start, begin = 0, offsets[0]
    for end in (*ends, len(buffers)):
        run += buffers[start:end]
        while len(run) > _MOST_BUFFERS:
            yield run[:_MOST_BUFFERS], begin
            begin += sum(map(len, run[:_MOST_BUFFERS]))
            del run[:_MOST_BUFFERS]
        if end == len(buffers):
            break
        gap = gaps[end - 1]
        if 0 < gap <= len(_GAP):
            run.append(_GAP[:gap])
        else:
            yield run, begin
            run, begin = [], offsets[end]
        start = end
    yield run, begin


def _fill(descriptor: int, buffers: list[memoryview], offset: int, wanted: int) -> int:
    """Read ``wanted`` bytes into ``buffers``; return the number read before the end of the file."""
    done = _read_at(descriptor, buffers, offset)
    while 0 < done < wanted:
        left = done
        rest: list[memoryview] = []
        for buffer in buffers:
            if left < len(buffer):
                rest.append(buffer[left:])
            left = max(0, left - len(buffer))
        count = _read_at(descriptor, rest, offset + done)
        if not count:
            break
        done += count
    return done


def _read_at(descriptor: int, buffers: list[memoryview], offset: int) -> int:
    """Read what one call returns; 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, buffers, offset)
    with _POSITION:
        os.lseek(descriptor, offset, os.SEEK_SET)
        chunk = os.read(descriptor, min(len(buffers[0]), 1 << 24))
    buffers[0][: len(chunk)] = chunk
    return len(chunk)


def _regular(path: Path, status: os.stat_result) -> FileState:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a device …"
        raise CheckpointError(f"{path} is not a regular file, it is {kind}")
    return FileState(status.st_size, status.st_mtime_ns)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn operating system errors into a CheckpointError with the file's name."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from None
    except ValueError as error:  # ValueError: the name contains a NUL character.
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{str(path)!r} is not a valid file name: {error}") from None
