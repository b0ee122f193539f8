"""Integers that the processes of one host tell each other through memory that they share.

How many tokens a rank brings its host knows before its GPU has anything to do.  Told here it takes microseconds, and
neither host waits for work that its GPU has queued.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import tempfile
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moe_core.parallel.distributed.agreement import exchange

if TYPE_CHECKING:
    from moe_core.parallel.distributed.communication import Communicator

#: how long a rank asks without a pause
_SPIN_SECONDS = 2e-3
#: a number's bits; the others of its word say in which call it was told
_BITS = 32


def tell(ranks: Communicator, numbers: Sequence[int], what: str) -> list[list[int]]:
    """The numbers of each of ``ranks``, told in shared memory where they are on one host, else by an all-gather.

    Args:
        ranks: All of them call this together.
        numbers: At most :func:`row_width` of them, from 0 up to 2^32 - 1; as many on each rank.
        what: A clause for errors.

    Returns:
        A row of numbers for each rank.

    Raises:
        CommunicationError: A rank does not come within the time-out.
    """
    size, table = dist.get_world_size(ranks.group), HostNumbers.connect(ranks, what)
    # rows of one width, so that calls of different kinds meet too
    width = row_width(size)
    row = [*numbers, *[0] * (width - len(numbers))]
    if table is not None:
        found = table.tell(ranks, row, what)
    else:
        mine = torch.tensor(row, dtype=torch.int64, device=ranks.device)
        told = mine.new_empty(size * width)
        ranks.begin(what, dist.all_gather_into_tensor, told, mine).wait()
        flat = ranks.numbers(told, what)
        found = [flat[start : start + width] for start in range(0, len(flat), width)]
    return [each[: len(numbers)] for each in found]


def share_memory(ranks: Communicator) -> bool:
    """Whether ``ranks``, which all ask at the same time, are on one host, so that :func:`tell` takes microseconds."""
    return HostNumbers.connect(ranks, "ranks find out whether they share memory") is not None


def row_width(size: int) -> int:
    """Most numbers that a rank of ``size`` tells: one for each rank, and what ranks compare in a call."""
    return size + 3


class HostNumbers:
    """A table in shared memory in which each rank writes a row of :func:`row_width` numbers.

    A word holds a number and that of the call, so a word is either whole or old.  There are two tables, for even and
    odd calls: who is in the call after next has read the rows of all in the next one, which all began after they had
    read this one's.
    """

    def __init__(self, memory: Any, rank: int, size: int) -> None:
        self._words = memoryview(memory).cast("q")
        self._rank, self._size = rank, size
        self._calls = 0
        #: what was told in a call that has not ended
        self._told: list[int] | None = None

    @staticmethod
    def nbytes(size: int) -> int:
        return 2 * size * row_width(size) * 8

    def tell(self, ranks: Communicator, numbers: Sequence[int], what: str) -> list[list[int]]:
        """The numbers of each of ``ranks``, which all tell a whole row; each from 0 up to 2^32 - 1.

        All ranks make the same calls in the same order.  Raises CommunicationError, with ``what``, where one does not
        come within the time-out; its call is then still waited for by the next, which tells the same numbers, since
        ranks that came late go by them: another CommunicationError if not.
        """
        with ranks.communicating(what):
            if self._told not in (None, list(numbers)):
                raise RuntimeError(
                    f"a call that told {self._told} has not ended, others go by these numbers, and this one tells "
                    f"{list(numbers)}: make the groups and layers anew on all ranks"
                )
        call = (self._calls + 1) % 2**30 + 1
        words, size, width = self._words, self._size, row_width(self._size)
        table = (call & 1) * size * width
        self._told = list(numbers)
        for index, number in enumerate(numbers):
            words[table + self._rank * width + index] = call << _BITS | number
        found: list[list[int]] = []
        started = time.monotonic()
        with ranks.communicating(what):
            for rank in range(size):
                first = table + rank * width
                row = words[first : first + width].tolist()
                while any(word >> _BITS != call for word in row):
                    waited = time.monotonic() - started
                    if waited > ranks.timeout.total_seconds():
                        late = [
                            member
                            for index, member in enumerate(ranks.members)
                            if words[table + index * width] >> _BITS != call
                        ]
                        raise RuntimeError(f"ranks {late} have told nothing after {waited:.1f} s")
                    if waited > _SPIN_SECONDS:
                        time.sleep(_SPIN_SECONDS / 20)
                    row = words[first : first + width].tolist()
                found.append([word & (1 << _BITS) - 1 for word in row])
        self._calls, self._told = self._calls + 1, None
        return found

    @staticmethod
    def connect(ranks: Communicator, what: str) -> HostNumbers | None:
        """The table of ``ranks``; None where they do not share memory, being on several hosts.

        The first call is made by all ranks at the same time.  Raises CommunicationError, with ``what``, where one does
        not come.
        """
        if ranks.group not in _TABLES:
            _TABLES[ranks.group] = _connect(ranks, what)
        return _TABLES[ranks.group]


#: no table holds its group
_TABLES: weakref.WeakKeyDictionary[dist.ProcessGroup, HostNumbers | None] = weakref.WeakKeyDictionary()


def _connect(ranks: Communicator, what: str) -> HostNumbers | None:
    rank, size = dist.get_rank(ranks.group), dist.get_world_size(ranks.group)
    path = ""
    if rank == 0:
        # a file in memory, where the system has such a folder
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with contextlib.suppress(OSError):
            handle, path = tempfile.mkstemp(prefix="moe-core-ranks-", dir=folder)
            os.truncate(handle, HostNumbers.nbytes(size))
            os.close(handle)
    try:
        told = [json.loads(text) for text in exchange(ranks, json.dumps([socket.gethostname(), path]), what)]
        memory = None
        if len({host for host, _ in told}) == 1 and told[0][1]:
            with contextlib.suppress(OSError, ValueError), open(told[0][1], "r+b") as file:
                memory = mmap.mmap(file.fileno(), HostNumbers.nbytes(size))
        # hosts of one name may be several containers; and nobody removes the file before all have it
        everywhere = all(text == "yes" for text in exchange(ranks, "no" if memory is None else "yes", what))
    finally:
        if path:
            os.unlink(path)
    return HostNumbers(memory, rank, size) if everywhere else None
