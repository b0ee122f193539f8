"""Communication in a process group, with timeouts and errors that name the ranks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from moe_core._support.async_result import AsyncResult
from moe_core.errors import CommunicationError, MoEError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: How long the host polls the device without sleeping.
_SPIN_SECONDS = 2e-3
#: Options of synchronous collectives, which on GPUs run on the current stream; the default operation is a sum.
_GATHER, _SUM_AND_SCATTER = AllgatherOptions(), ReduceScatterOptions()
_GATHER.asyncOp = _SUM_AND_SCATTER.asyncOp = False


class SharedByCopies:
    """Base of objects that deep copies of a layer share.

    They represent state that a rank shares with other ranks, which know of only one such object.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(frozen=True, eq=False)
class Communicator(SharedByCopies):
    """Communication among the ranks of a process group.

    ``what`` arguments are clauses for error messages: "tokens are gathered".

    Attributes:
        group: The process group.
        timeout: Timeout of the group, after which an error reports that a rank did not respond.
        shared: Result of :meth:`~moe_core.parallel.distributed.host_numbers.HostNumbers.connect`, once it was called.
    """

    group: ProcessGroup
    timeout: timedelta
    shared: list[Any] = field(default_factory=list, init=False, repr=False)

    @functools.cached_property
    def members(self) -> list[int]:
        """Ranks in torch's default process group, in the order of this group."""
        return list(dist.get_process_group_ranks(self.group))

    @functools.cached_property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    @functools.cached_property
    def on_gpus(self) -> bool:
        """Whether the group communicates tensors on GPUs (NCCL)."""
        return "nccl" in dist.get_backend(self.group)

    @property
    def device(self) -> torch.device:
        """Device of the tensors that the group communicates: the current GPU for NCCL, else the CPU."""
        return torch.device("cuda", torch.cuda.current_device()) if self.on_gpus else torch.device("cpu")

    @functools.cached_property
    def _backend(self) -> Any:
        return self.group._get_backend(torch.device("cuda" if self.on_gpus else "cpu"))

    def communicating(self, what: str) -> Communicating:
        """Return a context that converts errors of torch.distributed to CommunicationError.

        Args:
            what: Clause of error messages, such as "experts are moved".

        Returns:
            The context manager.
        """
        return Communicating(what, lambda: self.members, self.timeout)

    def begin(self, what: str, call: Callable[..., Any], *arguments: Any) -> AsyncResult[None]:
        """Begin a collective of torch.distributed.

        Args:
            what: Clause of error messages, such as "experts are moved".
            call: The collective, called as ``call(*arguments)``.
            arguments: Its arguments.

        Returns:
            The pending result; waiting for it may raise CommunicationError too.

        Raises:
            CommunicationError: The collective could not be started.
        """
        try:
            work = call(*arguments, group=self.group, async_op=True)
        except RuntimeError as error:
            self.communicating(what).convert(error)
            raise

        def finish() -> None:
            with self.communicating(what):
                work.wait()

        return AsyncResult(finish)

    def all_gather(self, what: str, gathered: Tensor, given: Tensor) -> None:
        """Gather the rows of all ranks; on GPUs ordered behind the current stream, like a kernel.

        The backend is called directly: torch's wrapper and dispatcher take half of the host time.

        Args:
            what: Clause of error messages, such as "experts are moved".
            gathered: ``[ranks * M, K]``, written.
            given: Rows of this rank, ``[M, K]``.

        Raises:
            CommunicationError: The collective failed.
        """
        self._collective(what, self._backend._allgather_base, gathered, given, _GATHER)

    def reduce_scatter(self, what: str, own: Tensor, partial: Tensor) -> None:
        """Sum rows over ranks, and keep this rank's; ordered and called like :meth:`all_gather`.

        Args:
            what: Clause of error messages, such as "experts are moved".
            own: Sums of this rank's rows, ``[M, K]``, written.
            partial: ``[ranks * M, K]``.

        Raises:
            CommunicationError: The collective failed.
        """
        self._collective(what, self._backend._reduce_scatter_base, own, partial, _SUM_AND_SCATTER)

    def _collective(self, what: str, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            work = call(*arguments)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            self.communicating(what).convert(error)
            raise

    def numbers(self, tensor: Tensor, what: str) -> list[int]:
        """Copy integers that a collective may have written to the host, and wait for them.

        Args:
            tensor: Integers ``[n]``.
            what: Clause of error messages, such as "experts are moved".

        Returns:
            The integers.

        Raises:
            CommunicationError: The timeout expired, on a GPU too.
        """
        if tensor.is_cuda:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            device = tensor.device
            tensor = pinned.copy_(tensor, non_blocking=True)
            self.synchronize(what, device)
        found: list[int] = tensor.tolist()
        return found

    def synchronize(self, what: str = "work is done on the device", device: torch.device | None = None) -> None:
        """Wait on the host for the current CUDA stream, including its communication, with a timeout.

        ``torch.cuda.synchronize`` would wait forever for a missing rank, until NCCL's watchdog ends the process.

        Args:
            what: Clause of error messages, such as "experts are moved".
            device: GPU of the stream. Default: the current one.

        Raises:
            CommunicationError: The timeout expired.
        """
        done: Any = torch.cuda.current_stream(device).record_event()
        started = time.monotonic()
        with self.communicating(what):
            while not done.query():
                waited = time.monotonic() - started
                if waited > self.timeout.total_seconds():
                    raise RuntimeError(f"the device has not finished after {waited:.1f} s")
                if waited > _SPIN_SECONDS:
                    time.sleep(_SPIN_SECONDS / 20)


class Communicating:
    """Context that converts errors of torch.distributed to CommunicationError.

    Other errors pass through. The message names the participating ranks.

    Args:
        what: Clause of error messages, such as "experts are moved".
        ranks: Function that returns the participating ranks.
        timeout: Timeout, for the message.
    """

    def __init__(self, what: str, ranks: Callable[[], Sequence[int]], timeout: timedelta) -> None:
        self._what, self._ranks, self._timeout = what, ranks, timeout

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.convert(error)

    def convert(self, error: BaseException) -> None:
        """Raise a CommunicationError in place of an error of torch.distributed; other errors are left alone.

        Args:
            error: Any error.

        Raises:
            CommunicationError: It is an error of torch.distributed.
        """
        # torch raises errors of NCCL and Gloo as RuntimeError; DistBackendError is a subclass.
        if isinstance(error, RuntimeError) and not isinstance(error, MoEError):
            raise self.failure(str(error)) from error

    def failure(self, details: str, late: Sequence[int] = ()) -> CommunicationError:
        """Return the error of communication that did not end in time.

        Args:
            details: What was found.
            late: Ranks that did not take part; empty if that is unknown.

        Returns:
            The error.
        """
        who = f"ranks {list(late)} have died, hang, or make" if late else "another rank has died, hangs, or makes"
        return CommunicationError(
            f"rank {dist.get_rank()}: {self._what} among ranks {list(self._ranks())}, and this did not end: {who} "
            f"another call (see {'their' if late else 'its'} output); the time-out is "
            f"{self._timeout.total_seconds():g} s",
            details=details,
        )
