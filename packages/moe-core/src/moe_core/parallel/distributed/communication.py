"""Calls among the ranks of a process group, with errors that say who did not come, and in time."""

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

#: how long the host asks without a pause whether the device is ready
_SPIN_SECONDS = 2e-3


class SharedByCopies:
    """What a rank has together with other ranks: copies of a layer share it, as these ranks know of one alone."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(frozen=True, eq=False)
class Communicator(SharedByCopies):
    """What calls among the ranks of ``group`` go through.

    ``timeout``: that of the group, after which errors say that a rank did not come.  ``what`` of a call is a clause for
    errors: "tokens are gathered".
    """

    group: ProcessGroup
    timeout: timedelta

    @property
    def members(self) -> list[int]:
        """Ranks of torch's default process group, in the group's order."""
        return list(dist.get_process_group_ranks(self.group))

    @property
    def device(self) -> torch.device:
        """Where tensors are that the group sends: the current GPU for NCCL, else the CPU."""
        if "nccl" in dist.get_backend(self.group):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def communicating(self, what: str) -> Communicating:
        """A context in which errors of torch.distributed become CommunicationError, with the ranks."""
        return Communicating(what, lambda: self.members, self.timeout)

    def begin(self, what: str, call: Callable[..., Any], *arguments: Any) -> Pending[None]:
        """Begin ``call(*arguments)``, a collective of torch.distributed.

        Raises CommunicationError, as waiting for the result does.
        """
        with self.communicating(what):
            work = call(*arguments, group=self.group, async_op=True)

        def finish() -> None:
            with self.communicating(what):
                work.wait()

        return Pending(finish)

    def numbers(self, tensor: Tensor, what: str) -> list[int]:
        """The integers of a tensor [n], which a call between ranks may write, on the host, which waits for them.

        On a GPU too it waits no longer than the time-out: then CommunicationError is raised.
        """
        if tensor.is_cuda:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            device = tensor.device
            tensor = pinned.copy_(tensor, non_blocking=True)
            self.synchronize(what, device)
        found: list[int] = tensor.tolist()
        return found

    def synchronize(self, what: str = "work is done on the device", device: torch.device | None = None) -> None:
        """Wait on the host for the work of the current CUDA stream, calls between ranks too, within the time-out.

        ``device``: the GPU whose stream it is, default the current one.

        ``torch.cuda.synchronize`` would wait for ever for a rank that is not there, until the watchdog of NCCL ends the
        process.  Raises CommunicationError.
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
    """A context: errors of torch.distributed become CommunicationError; what is no such error passes.

    ``what``: a clause; ``ranks`` gives those that take part.
    """

    def __init__(self, what: str, ranks: Callable[[], Sequence[int]], timeout: timedelta) -> None:
        self._what, self._ranks, self._timeout = what, ranks, timeout

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # torch raises the errors of NCCL and Gloo as RuntimeError, DistBackendError among them
        if isinstance(error, RuntimeError) and not isinstance(error, MoEError):
            raise CommunicationError(
                f"rank {dist.get_rank()}: {self._what} among ranks {list(self._ranks())}, and this did not end: "
                "another rank has died, hangs, or makes another call (see its output); the time-out is "
                f"{self._timeout.total_seconds():g} s",
                details=str(error),
            ) from error
