"""Exchange buffers in torch symmetric memory.

The GPUs of one host map this memory into each other.
NVLink multicast is not used. torch would set it up wherever possible, so it is disabled.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_core._support.stream_order import StreamOrder
from moe_core.errors import CommunicationError, ConfigError, FallbackWarning
from moe_core.kernels.ops.exchange import ExchangeBuffer, ExchangeShape
from moe_core.kernels.ops.token_layout import TokenCode
from moe_core.parallel.distributed.agreement import exchange
from moe_core.parallel.distributed.communication import SharedByCopies

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from moe_core.parallel.distributed.communication import Communicator
    from moe_core.parallel.distributed.groups import ParallelGroups

#: Number of calls that may be in flight at the same time, each with a separate buffer.
BUFFERS = 2
#: Largest number of such calls where buffers are allocated on demand.
MOST_CALLS = 8

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def reasons_against(groups: ParallelGroups, device: torch.device, own: list[str]) -> list[str]:
    """Return why ranks that exchange tokens cannot share memory; empty if they can.

    All ranks of the layer call this and get the same result.

    Args:
        groups: Process groups of the layer.
        device: Device of this rank.
        own: Reasons that this rank already knows.

    Returns:
        The reasons.

    Raises:
        CommunicationError: A rank did not call.
    """
    group = groups.tokens
    if group is None:
        return own
    mine = (socket.gethostname(), _identity(device), own or _own_reasons(device))
    found = _told(groups.among(), mine)
    texts = list(dict.fromkeys(text for _, _, mine in found for text in mine))
    reasons = []
    for text in texts:
        ranks = [rank for rank, (_, _, mine) in enumerate(found) if text in mine]
        reasons.append(f"{'each rank' if len(ranks) == len(found) else f'rank {ranks[0]}'} {text}")
    # Only a process that sees the GPUs of the others can query access.
    everyone = groups.among().members
    exchanged = [found[everyone.index(rank)] for rank in groups.among(group).members]
    hosts = sorted({host for host, _, _ in exchanged})
    blocked = []
    if len(hosts) > 1:
        blocked = [f"its ranks are on {len(hosts)} hosts ({', '.join(hosts)}), and GPUs share memory within one"]
    elif len({name for _, name, _ in exchanged}) < len(exchanged) and not reasons:
        blocked = ["several ranks are on one GPU"]
    elif not reasons:
        blocked = [
            f"the GPU of rank {groups.parallel.rank} can't reach another rank's (no peer-to-peer access)"
            for _, name, _ in exchanged
            if not _reaches(device, name)
        ]
    return reasons + list(dict.fromkeys(text for texts in _told(groups.among(), blocked) for text in texts))


def _told(ranks: Communicator, mine: Any) -> list[Any]:
    """All-gather a JSON-ready value of each rank."""
    texts = exchange(ranks, json.dumps(mine), "ranks tell whether their GPUs can share memory")
    return [json.loads(text) for text in texts]


def _own_reasons(device: torch.device) -> list[str]:
    """Reasons that this rank can determine locally, as predicates without a subject."""
    if device.type != "cuda" or torch.version.hip is not None:
        return [f"has its tokens on {'a ROCm GPU' if device.type == 'cuda' else device}, not on an NVIDIA GPU"]
    if torch.cuda.get_device_capability(device) < (8, 0):
        return ["has a GPU older than sm_80"]
    try:
        import torch.distributed._symmetric_memory as symm_mem
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError as error:
        return [f"has a torch without symmetric memory ({error})"]
    backend = symm_mem.get_backend(device)
    if backend not in (None, "CUDA"):
        return [f"has torch's symmetric memory on {backend}, expected TORCH_SYMMMEM=CUDA"]
    with _without_multicast():
        if _SymmetricMemory.has_multicast_support(torch._C._autograd.DeviceType.CUDA, device.index or 0):
            return [f"has a torch version that sets up NVLink multicast despite {_NO_MULTICAST}=1"]
    return []


def _identity(device: torch.device) -> str:
    """Identify the GPU independently of its index in a process."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)


def _reaches(device: torch.device, name: str) -> bool:
    """False if this process sees the GPU ``name`` and ``device`` has no peer access to it."""
    for index in range(torch.cuda.device_count()):
        other = torch.device("cuda", index)
        if _identity(other) == name and index != device.index:
            return torch.cuda.can_device_access_peer(device, other)
    return True


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


class _Calls:
    """Tracks which buffers are in use; calls with the same buffer run in order across streams."""

    def __init__(self, buffers: int) -> None:
        self.busy = [False] * buffers
        self._orders = [StreamOrder() for _ in range(buffers)]

    def follow(self, number: int, device: torch.device) -> None:
        """Order later work of the current stream behind the last call with this buffer."""
        if device.type == "cuda":
            self._orders[number].follow(device)

    def end(self, number: int, device: torch.device) -> None:
        """Mark a call as fully launched; its last step was on the current stream."""
        self.busy[number] = False
        self.follow(number, device)


class ExchangeBuffers(SharedByCopies):
    """The buffers of a rank, used round-robin by the calls of all layers that share them.

    All ranks make the same calls in the same order, so they use the same buffers. A CUDA graph keeps using the buffers
    that it was captured with.

    Args:
        buffers: The buffers.
        keep: Object that keeps their memory alive.
    """

    def __init__(self, buffers: list[ExchangeBuffer], keep: object = None) -> None:
        self.buffers = buffers
        self._keep = keep
        self._calls = _Calls(len(buffers))
        self._next = 0

    def take(self) -> int:
        """Reserve the buffer of the next call.

        Returns:
            Its number.

        Raises:
            ConfigError: The previous call with this buffer has not ended.
        """
        number = self._next
        if self._calls.busy[number]:
            raise _too_many(len(self.buffers))
        self._calls.follow(number, self.buffers[number].memory.device)
        self._calls.busy[number] = True
        self._next = (number + 1) % len(self.buffers)
        return number

    def release(self, number: int) -> None:
        """Mark the call that used a buffer as ended.

        Args:
            number: Number of the buffer.
        """
        self._calls.end(number, self.buffers[number].memory.device)

    @property
    def missing(self) -> list[int]:
        """Ranks for which a wait on the device timed out, as far as the host knows."""
        return _missing(self.buffers)

    @staticmethod
    def connect(shape: ExchangeShape, ranks: Communicator, device: torch.device) -> ExchangeBuffers:
        """Allocate buffers that all ranks can access, or return existing ones of the same shape.

        All ranks call it at the same time, outside CUDA graph capture.

        Args:
            shape: Shape of the exchange.
            ranks: The ranks.
            device: Device of this rank.

        Returns:
            The buffers.

        Raises:
            CommunicationError: A rank did not call, or torch cannot map the memory.
            ConfigError: A CUDA graph is being captured and the buffers do not exist yet.
        """
        key = (ranks.group.group_name, device, shape)
        found = _SHARED.get(key)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                raise ConfigError("the first call maps the GPUs' shared memory: run one before capturing a CUDA graph")
            found = _SHARED[key] = ExchangeBuffers(*_connect(shape, shape.nbytes, BUFFERS, ranks, device))
        return found


#: Layers of one shape run one after another, so they share memory.
_SHARED: weakref.WeakValueDictionary[tuple[str, torch.device, ExchangeShape], ExchangeBuffers] = (
    weakref.WeakValueDictionary()
)


class ExchangeRoom(SharedByCopies):
    """Buffers that grow with the calls, shared by all layers whose tokens a group exchanges.

    All ranks make the same calls with the same sizes in the same order. They therefore grow their buffers together,
    which is a collective call, and use the same one: the first that is free. A buffer that a CUDA graph was captured
    with is kept as long as the room, because replays use it.

    Args:
        device: Device of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[ExchangeBuffer, object] | None] = [None] * MOST_CALLS
        self._calls = _Calls(MOST_CALLS)
        self._captured = [False] * MOST_CALLS
        self._kept: list[tuple[ExchangeBuffer, object]] = []

    def take(self, ranks: Communicator, shape: ExchangeShape, code: TokenCode) -> tuple[int, ExchangeBuffer]:
        """Reserve a buffer for a call, and grow it if necessary.

        Args:
            ranks: The ranks of the call.
            shape: Shape of the exchange.
            code: Encoding of tokens.

        Returns:
            Number of the buffer, and the buffer.

        Raises:
            ConfigError: No buffer is free, or one would have to grow during CUDA graph capture.
            CommunicationError: A rank did not participate in growing.
        """
        if all(self._calls.busy):
            raise _too_many(MOST_CALLS)
        number = self._calls.busy.index(False)
        self._calls.follow(number, self._device)
        capturing = _capturing(self._device)
        found = self._buffers[number]
        buffer = None if found is None else found[0].of_call(shape, code)
        if buffer is None:
            if capturing:
                raise ConfigError(
                    "shared memory cannot grow during CUDA graph capture: before it, run a call of the same size, "
                    "and as many calls at a time"
                )
            buffer = self._grow(ranks, number, shape, code).of_call(shape, code)
            if buffer is None:
                raise ConfigError(f"the buffer for {shape} and {code} is too small")
        self._captured[number] |= capturing
        self._calls.busy[number] = True
        return number, buffer

    def release(self, number: int) -> None:
        """Mark the call that used a buffer as ended.

        Args:
            number: Number of the buffer.
        """
        self._calls.end(number, self._device)

    @property
    def missing(self) -> list[int]:
        """Ranks for which a wait on the device timed out, as far as the host knows."""
        return _missing(self._each())

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.memory.shape[0] for buffer in self._each())

    def _each(self) -> list[ExchangeBuffer]:
        return [found[0] for found in (*self._kept, *self._buffers) if found is not None]

    def _grow(self, ranks: Communicator, number: int, shape: ExchangeShape, code: TokenCode) -> ExchangeBuffer:
        old = self._buffers[number]
        results, tokens = shape.results_nbytes, shape.nbytes_of(code) - shape.arrived
        if old is not None:
            results = max(results, old[0].shape.results_nbytes)
            tokens = max(tokens, old[0].memory.shape[0] - old[0].shape.arrived)
        shape = replace(shape, results_room=_in_steps(results))
        if old is not None:
            # Make sure that no rank still writes into memory about to be freed.
            ranks.synchronize("calls between GPUs end before their memory grows", self._device)
            _told(ranks, None)
            if self._captured[number]:
                self._kept.append(old)
                self._captured[number] = False
            self._buffers[number] = old = None
        (buffer,), keep = _connect(shape, shape.arrived + _in_steps(tokens), 1, ranks, self._device)
        self._buffers[number] = buffer, keep
        return buffer

    @staticmethod
    def connect(ranks: Communicator, groups: ParallelGroups, device: torch.device) -> ExchangeRoom | None:
        """Return the room of a group, or create it; all ranks call this at the same time.

        A new room is created unless all ranks still have the existing one: the memory is freed with the last layer that
        uses it.

        Args:
            ranks: The ranks.
            groups: Process groups of the layer.
            device: Device of this rank.

        Returns:
            The room, or None if the GPUs cannot share memory.
        """
        rooms = _ROOMS.setdefault(ranks.group, {})
        known = rooms.get(device, lambda: None)
        room = None if known is None else known()
        # Buffer pools are weakly referenced: one rank may have freed its pool while another still holds one.
        if known is not None and not all(_told(ranks, room is not None)):
            room = _new_room(ranks, groups, device)
            rooms[device] = None if room is None else weakref.ref(room)
        return room


#: Rooms by group and device, None where memory cannot be shared. Rooms do not reference their group, so weak keys work.
_ROOMS: weakref.WeakKeyDictionary[ProcessGroup, dict[torch.device, Callable[[], ExchangeRoom | None] | None]] = (
    weakref.WeakKeyDictionary()
)


def _new_room(ranks: Communicator, groups: ParallelGroups, device: torch.device) -> ExchangeRoom | None:
    if reasons_against(groups, device, []):
        return None
    room, failed = ExchangeRoom(device), ""
    try:
        shape = ExchangeShape(len(ranks.members), 1, 1, 1, torch.bfloat16)
        room.release(room.take(ranks, shape, TokenCode(1, torch.bfloat16))[0])
    except CommunicationError as error:
        failed = f"{error.message} ({error.details})"
    failures = [text for text in _told(ranks, failed) if text]
    if failures:
        warnings.warn(
            f"GPUs cannot map each other's memory; falling back to torch's all-to-all: {failures[0]}",
            FallbackWarning,
            2,
        )
        return None
    return room


def _missing(buffers: Iterable[ExchangeBuffer]) -> list[int]:
    late = [buffer for buffer in buffers if any(buffer.alarm.tolist())]
    return sorted({rank for buffer in late for rank in buffer.missing})


def _in_steps(nbytes: int) -> int:
    """Round up so that memory rarely grows: powers of two from 8 MiB, then multiples of 128 MiB."""
    step = min(max(1 << (nbytes - 1).bit_length(), 2**23), 2**27)
    return -(-nbytes // step) * step


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _too_many(calls: int) -> ConfigError:
    return ConfigError(
        f"{calls} calls are under way already, or one has failed: end each call with result() "
        "before more are started; after an error make the layer's groups anew on all ranks"
    )


def _connect(
    shape: ExchangeShape, nbytes: int, count: int, ranks: Communicator, device: torch.device
) -> tuple[list[ExchangeBuffer], object]:
    """Allocate ``count`` buffers of ``nbytes`` each; return them and what keeps them alive."""
    import torch.distributed._symmetric_memory as symm_mem

    each = -(-nbytes // 256) * 256
    what = "GPUs map each other's memory"
    with ranks.communicating(what), _without_multicast(), torch.cuda.device(device):
        memory: Tensor = symm_mem.empty(count * each, dtype=torch.uint8, device=device)
        memory.zero_()
        torch.cuda.synchronize(device)
        handle = symm_mem.rendezvous(memory, ranks.group)
        if handle is None:
            raise RuntimeError("torch's symmetric memory gave no handle")
        # Offset of a rank's tensor in the memory that torch has mapped, which may be larger.
        starts = _told(ranks, memory.data_ptr() - handle.buffer_ptrs[handle.rank])
        first = [base + start for base, start in zip(handle.buffer_ptrs, starts, strict=True)]
    if not all(handle.buffer_ptrs):
        raise CommunicationError("torch's symmetric memory gave no address of another rank's memory")
    buffers = []
    for number in range(count):
        alarm = torch.zeros((shape.ranks,), dtype=torch.int32, device="cpu", pin_memory=True)
        addresses = [*(address + number * each for address in first), alarm.data_ptr()]
        buffers.append(
            ExchangeBuffer(
                shape,
                handle.rank,
                memory[number * each : (number + 1) * each],
                torch.tensor(addresses, dtype=torch.int64, device=device),
                ExchangeBuffer.state_of(shape.ranks, device),
                alarm,
            )
        )
    torch.cuda.synchronize(device)
    _told(ranks, None)  # no rank may write before all are ready
    return buffers, handle
