"""Calls that use the same memory on different streams run one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.errors import ConfigError


class StreamOrder:
    """The stream that used a piece of memory last; the next one waits for it.

    Nothing is done on the device while the stream stays the same.  Where it changes, an event behind everything that
    was launched on the old stream is waited for.  Calls that are captured in a CUDA graph are ordered among themselves:
    a capture can't wait for work outside of it, so replays are ordered by whoever starts them.
    """

    def __init__(self) -> None:
        # as the driver names streams, since that is what is fast to ask for; None: not used yet
        self._eager: int | None = None
        self._captured: int | None = None

    def follow(self, device: torch.device, memory: Tensor | None = None) -> bool:
        """Have the current stream of ``device``, which is the current device, run behind the last call.

        Args:
            device: The GPU that the memory is on, with its number.
            memory: The memory, if it is freed without asking for its users: torch keeps it until a stream that it was
                not allocated on is done with it.

        Returns:
            Whether the current stream is being captured in a CUDA graph.

        Raises:
            ConfigError: The last call was on a stream that is being captured now, and the current one is not.
        """
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        if torch.cuda.is_current_stream_capturing():
            if stream != self._captured:
                before, self._captured = self._captured, stream
                # that of an earlier graph has nothing to wait for
                if before is not None and _capturing(known := _stream(before, device)):
                    torch.cuda.current_stream(device).wait_stream(known)
            return True
        if stream != self._eager:
            if self._eager is not None:
                self._wait(_stream(self._eager, device), device, memory)
            self._eager = stream
        return False

    @staticmethod
    def _wait(before: torch.cuda.Stream, device: torch.device, memory: Tensor | None) -> None:
        if _capturing(before):
            raise ConfigError(
                f"memory that calls share was last used on {before}, which is being captured in a CUDA graph: the "
                "current stream can't wait for it. Make this call before or after the capture, or give the layers of "
                "each stream a workspace of their own"
            )
        current = torch.cuda.current_stream(device)
        current.wait_stream(before)
        if memory is not None:
            memory.record_stream(current)


def _stream(number: int, device: torch.device) -> torch.cuda.Stream:
    """The stream that the driver names so."""
    if not number:  # torch.cuda.ExternalStream would take that for no stream at all, and make one
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(number, device=device)  # type: ignore[no-untyped-call]


def _capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
