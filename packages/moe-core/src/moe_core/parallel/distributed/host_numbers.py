"""Exchange integers between the processes of one host through shared memory.

The host knows how many tokens its rank brings before its GPU has any work. An exchange between hosts takes
microseconds, and no host waits for work queued on its GPU.
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

#: How long a rank polls without sleeping.
_SPIN_SECONDS = 2e-3
#: Bits of a number; the remaining bits of its word hold the number of the call.
_BITS = 32


def tell(ranks: Communicator, numbers: Sequence[int], what: str) -> list[list[int]]:
    """Exchange numbers among ranks, in shared memory on one host, else by an all-gather.

    Args:
        ranks: All of them call this together.
        numbers: At most :func:`row_width` numbers, from 0 to 2^32 - 1; equally many on each rank.
        what: Clause of error messages, such as "experts are moved".

    Returns:
        The numbers of each rank, padded with zeros to :func:`row_width`.

    Raises:
        CommunicationError: A rank did not call within the timeout.
    """
    # Rows have a fixed width, so that calls of different kinds match too.
    width = row_width(ranks.size)
    row = [*numbers, *[0] * (width - len(numbers))]
    table = HostNumbers.connect(ranks, what)
    if table is not None:
        return table.tell(ranks, row, what)
    mine = torch.tensor(row, dtype=torch.int64, device=ranks.device)
    told = mine.new_empty(ranks.size * width)
    ranks.begin(what, dist.all_gather_into_tensor, told, mine).wait()
    return _rows(ranks.numbers(told, what), width)


def row_width(size: int) -> int:
    """Return the largest number of integers per rank: one for each rank, and the call's facts.

    Args:
        size: Number of ranks.

    Returns:
        The number of integers.
    """
    return size + 3


class HostNumbers:
    """A table in shared memory in which each rank writes a row of :func:`row_width` numbers.

    Each word holds a number and the number of its call, so a word is either complete or stale. There are two tables,
    for even and odd calls. A rank that enters the call after next has read all rows of the next call, and every rank
    began that one only after it had read the rows of this call.

    Args:
        memory: Shared memory of :meth:`nbytes` bytes.
        rank: This rank's position in the group.
        size: Number of ranks.
    """

    def __init__(self, memory: Any, rank: int, size: int) -> None:
        self._words = memoryview(memory).cast("q")
        self._rank, self._size = rank, size
        self._calls = 0
        #: Numbers of a call that has not ended.
        self._told: list[int] | None = None

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the size of the shared memory.

        Args:
            size: Number of ranks.

        Returns:
            Size in bytes.
        """
        return 2 * size * row_width(size) * 8

    def tell(self, ranks: Communicator, numbers: Sequence[int], what: str) -> list[list[int]]:
        """Exchange one full row of numbers per rank.

        All ranks make the same calls in the same order. After a timeout the call is still pending: the next call must
        pass the same numbers, because late ranks have used them.

        Args:
            ranks: The ranks.
            numbers: A full row, each number from 0 to 2^32 - 1.
            what: Clause of error messages, such as "experts are moved".

        Returns:
            The row of each rank.

        Raises:
            CommunicationError: A rank did not call within the timeout, or the numbers differ from those of a pending
                call.
        """
        call = (self._calls + 1) % 2**30 + 1
        width = len(numbers)
        mark, table = call << _BITS, (call & 1) * self._size * width
        row = [mark | number for number in numbers]
        if self._told not in (None, row):
            raise ranks.communicating(what).failure(
                f"a call that sent the token counts {_values(self._told or [])} has not finished, and this one "
                f"sends {list(numbers)}: recreate the groups and layers on all ranks"
            )
        self._told = row
        for index, word in enumerate(row, table + self._rank * width):
            self._words[index] = word
        words = self._words[table : table + self._size * width]
        found = words.tolist()
        if [word for word in found if word >> _BITS != call]:
            found = self._waited(ranks, words, call, what)
        self._calls, self._told = self._calls + 1, None
        return _rows(_values(found), width)

    def _waited(self, ranks: Communicator, words: memoryview[int], call: int, what: str) -> list[int]:
        """Wait until every word of a table belongs to ``call``; return the words."""
        started, limit = time.monotonic(), ranks.timeout.total_seconds()
        while True:
            found = words.tolist()
            stale = [index for index, word in enumerate(found) if word >> _BITS != call]
            if not stale:
                return found
            waited = time.monotonic() - started
            if waited > limit:
                width = len(found) // self._size
                late = [ranks.members[rank] for rank in dict.fromkeys(index // width for index in stale)]
                raise ranks.communicating(what).failure(
                    f"ranks {late} sent no token counts within {waited:.1f} s", late
                )
            if waited > _SPIN_SECONDS:
                time.sleep(_SPIN_SECONDS / 20)

    @staticmethod
    def connect(ranks: Communicator, what: str) -> HostNumbers | None:
        """Return the table of a group; None if its ranks are on several hosts.

        The first call must be made by all ranks at the same time.

        Args:
            ranks: The ranks.
            what: Clause of error messages, such as "experts are moved".

        Returns:
            The table, or None.

        Raises:
            CommunicationError: A rank did not call.
        """
        if not ranks.shared:
            if ranks.group not in _TABLES:
                _TABLES[ranks.group] = _connect(ranks, what)
            ranks.shared.append(_TABLES[ranks.group])
        found: HostNumbers | None = ranks.shared[0]
        return found


#: Tables do not reference their group, so weak keys work.
_TABLES: weakref.WeakKeyDictionary[dist.ProcessGroup, HostNumbers | None] = weakref.WeakKeyDictionary()


def _connect(ranks: Communicator, what: str) -> HostNumbers | None:
    rank, size = dist.get_rank(ranks.group), ranks.size
    path = ""
    if rank == 0:
        # Use an in-memory file if the system has such a folder.
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
        # Equal host names may belong to several containers. This exchange also delays the removal of the file until all
        # ranks have opened it.
        everywhere = all(text == "yes" for text in exchange(ranks, "no" if memory is None else "yes", what))
    finally:
        if path:
            os.unlink(path)
    return HostNumbers(memory, rank, size) if everywhere else None


def _values(words: Sequence[int]) -> list[int]:
    """Return the numbers that words hold."""
    return [word & (1 << _BITS) - 1 for word in words]


def _rows(flat: list[int], width: int) -> list[list[int]]:
    return [flat[start : start + width] for start in range(0, len(flat), width)]
