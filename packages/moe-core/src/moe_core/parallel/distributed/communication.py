"""Communication in a process group, with timeouts and errors that name the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core._support.async_result import Pending
from moe_core.errors import CommunicationError, MoEError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: How long the host polls the device without sleeping.
_SPIN_SECONDS = 2e-3


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
    """

    group: ProcessGroup
    timeout: timedelta

    @property
    def members(self) -> list[int]:
        """Ranks in torch's default process group, in the order of this group."""
        return list(dist.get_process_group_ranks(self.group))

    @property
    def device(self) -> torch.device:
        """Device of the tensors that the group communicates: the current GPU for NCCL, else the CPU."""
        if "nccl" in dist.get_backend(self.group):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def communicating(self, what: str) -> Communicating:
        """Return a context that converts errors of torch.distributed to CommunicationError.

        Args:
            what: A clause for errors.

        Returns:
            The context manager.
        """
        return Communicating(what, lambda: self.members, self.timeout)

    def begin(self, what: str, call: Callable[..., Any], *arguments: Any) -> Pending[None]:
        """Begin a collective of torch.distributed.

        Args:
            what: A clause for errors.
            call: The collective, called as ``call(*arguments)``.
            arguments: Its arguments.

        Returns:
            The pending result; waiting for it may raise CommunicationError too.

        Raises:
            CommunicationError: The collective could not be started.
        """
        with self.communicating(what):
            work = call(*arguments, group=self.group, async_op=True)

        def finish() -> None:
            with self.communicating(what):
                work.wait()

        return Pending(finish)

    def numbers(self, tensor: Tensor, what: str) -> list[int]:
        """Copy integers that a collective may have written to the host, and wait for them.

        Args:
            tensor: Integers ``[n]``.
            what: A clause for errors.

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
            what: A clause for errors.
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
        what: A clause for errors.
        ranks: Function that returns the participating ranks.
        timeout: Timeout, for the message.
    """

    def __init__(self, what: str, ranks: Callable[[], Sequence[int]], timeout: timedelta) -> None:
        self._what, self._ranks, self._timeout = what, ranks, timeout

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # torch raises errors of NCCL and Gloo as RuntimeError; DistBackendError is a subclass.
        if isinstance(error, RuntimeError) and not isinstance(error, MoEError):
            raise CommunicationError(
                f"rank {dist.get_rank()}: {self._what} among ranks {list(self._ranks())}, and this did not end: "
                "another rank has died, hangs, or makes another call (see its output); the time-out is "
                f"{self._timeout.total_seconds():g} s",
                details=str(error),
            ) from error
