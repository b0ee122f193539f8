"""A regular file that is read by position, and never mapped.

Reading a mapping of a file that somebody truncates ends the process (SIGBUS); a read comes back short, which is an
error with the file's name.  A file is read as it was when it was first looked at (:class:`FileState`), or not at all.
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

# where os.preadv does not exist, threads take turns in moving the position
_POSITION = threading.Lock()
#: buffers that one call of the system fills at most (IOV_MAX of Linux, macOS and the BSDs)
_MOST_BUFFERS = 1024
#: bytes between two parts that are read with them: fewer calls of the system, after each of which a thread waits for
#: Python's lock.  All threads read them into the same memory, at which nobody looks
_GAP = memoryview(bytearray(16 << 10))


@dataclass(frozen=True)
class FileState:
    """What a file has that changes with its content.

    Not its inode: file systems in user space number files anew between two looks.
    """

    size: int
    mtime_ns: int

    @staticmethod
    def of(path: Path) -> FileState:
        """The state of a regular file (symbolic links are followed: download caches consist of them).

        Raises CheckpointError for what can't be looked at, and for pipes and devices: reading one may never end.
        """
        with _named(path):
            return _regular(path, path.stat())


class OpenFile:
    """A file, open for reading until nobody holds it.  Threads may read at the same time.

    ``expected``: the state that it had before.  Raises CheckpointError where it has another one by now, here and when
    it is read.
    """

    def __init__(self, path: Path, expected: FileState | None = None) -> None:
        self.path = path
        self.state = FileState.of(path) if expected is None else expected
        with _named(path):
            # a pipe that has taken the file's place must not make this wait for a writer
            flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
            self._descriptor = os.open(path, flags)
        weakref.finalize(self, os.close, self._descriptor)
        self._check_unchanged()
        if len(LFS_POINTER) < self.state.size < LFS_POINTER_BYTES and self.read(0, len(LFS_POINTER)) == LFS_POINTER:
            raise CheckpointError(lfs_hint(path))

    def __reduce__(self) -> tuple[type[OpenFile], tuple[Path, FileState]]:
        # a descriptor is of no use in another process
        return OpenFile, (self.path, self.state)

    def read(self, offset: int, count: int) -> bytes:
        """``count`` bytes from ``offset``."""
        buffer = bytearray(count)
        self.read_all([(memoryview(buffer), offset)])
        return bytes(buffer)

    def read_all(self, parts: Iterable[tuple[memoryview, int]]) -> None:
        """Fill each buffer, which counts bytes, from its offset.

        The file is looked at once for all of them, and what lies one behind the other, or almost, is read at once.
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
                f"{self.path} is truncated: {short[0]} bytes were expected at {short[1]}, {short[2]} are there"
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
    """Buffers of consecutive parts that follow one another in the file, and the offset of the first.

    Small gaps between them have buffers too.
    """
    listed = list(parts)
    if not listed:
        return
    # a layer's parts are many, and few have a gap behind them
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
    """Read into ``buffers``, ``wanted`` bytes in all; how many came before the end of the file."""
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
    """Read what comes at once; 0 at the end of the file."""
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
    """Errors of the system as CheckpointError with the file's name."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from None
    except ValueError as error:  # a name with a NUL in it
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{str(path)!r} is no file name: {error}") from None
