"""Ordering of calls that use the same memory on different streams."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.errors import ConfigError


class StreamOrder:
    """Tracks the stream that used some memory last, and makes the next stream wait for it.

    Nothing happens on the device while the stream stays the same. On a change, the new stream waits for an event
    recorded after all launches on the old one. Calls captured in a CUDA graph are ordered among themselves only: a
    capture cannot wait for work outside it, so the caller must order replays.
    """

    def __init__(self) -> None:
        # Raw stream handles, which are fast to query; None: not used yet.
        self._eager: int | None = None
        self._captured: int | None = None

    def follow(self, device: torch.device, memory: Tensor | None = None) -> bool:
        """Make the current stream of ``device``, the current device, wait for the last call.

        Args:
            device: The GPU that the memory is on, with its index.
            memory: The memory, if its owner may free it without checking for users. torch then keeps it until the
                streams that use it, other than the one that allocated it, are done.

        Returns:
            Whether the current stream is being captured in a CUDA graph.

        Raises:
            ConfigError: The last call was on a stream that is being captured now, and the current one is not.
        """
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        if torch.cuda.is_current_stream_capturing():
            if stream != self._captured:
                before, self._captured = self._captured, stream
                # A stream of an earlier, finished capture has nothing to wait for.
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
                f"the shared workspace was last used on {before}, which is being captured in a CUDA graph: the "
                "current stream can't wait for it. Make this call before or after the capture, or give the layers of "
                "each stream a separate workspace"
            )
        current = torch.cuda.current_stream(device)
        current.wait_stream(before)
        if memory is not None:
            memory.record_stream(current)


def _stream(number: int, device: torch.device) -> torch.cuda.Stream:
    """Stream with a raw handle."""
    if not number:  # torch.cuda.ExternalStream would treat 0 as "no stream" and create a new one.
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(number, device=device)  # type: ignore[no-untyped-call]


def _capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
