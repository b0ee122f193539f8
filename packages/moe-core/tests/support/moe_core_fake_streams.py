"""Streams, events and CUDA-graph captures that only note what runs behind what, where there is no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch


class Stream:
    """A stream by its number; ``reached``: how much of every stream's work is behind whatever it does next."""

    def __init__(self, gpu: FakeGPU, number: int) -> None:
        self.gpu, self.number = gpu, number
        self.reached: dict[int, int] = {number: 0}
        #: the capture that it is a part of
        self.capture: object = None

    def wait_stream(self, other: Stream) -> None:
        """As torch's: an event on ``other``, which this one waits for."""
        if other.capture is not self.capture:
            raise RuntimeError("cudaErrorStreamCaptureIsolation: one stream is being captured, the other is not")
        self.gpu.waits.append((self.number, other.number))
        for number, work in other.reached.items():
            self.reached[number] = max(self.reached.get(number, 0), work)


class FakeGPU:
    """What :mod:`torch.cuda` says of streams, instead of it; work is done by :meth:`work`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: dict[int, Stream] = {}
        self.now = self.stream(0)
        self.waits: list[tuple[int, int]] = []
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.now.number)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.now.capture is not None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: self.stream(0))
        monkeypatch.setattr(torch.cuda, "ExternalStream", self.external)
        monkeypatch.setattr(torch.cuda, "stream", self.current)

    def stream(self, number: int) -> Stream:
        """The stream with this number."""
        if number not in self.streams:
            self.streams[number] = Stream(self, number)
        return self.streams[number]

    def external(self, number: int, device: torch.device) -> Stream:
        """As torch's, to which 0 is no stream."""
        assert number
        return self.stream(number)

    @contextlib.contextmanager
    def current(self, stream: Stream) -> Iterator[None]:
        """As :func:`torch.cuda.stream`."""
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    @contextlib.contextmanager
    def capturing(self, *numbers: int) -> Iterator[None]:
        """These streams are captured in one graph; the first is the current one."""
        capture = object()
        for number in numbers:
            self.stream(number).capture = capture
        try:
            with self.current(self.stream(numbers[0])):
                yield
        finally:
            for number in numbers:
                self.stream(number).capture = None

    def work(self) -> tuple[int, int]:
        """Something on the current stream: what it is behind everything else of which."""
        stream = self.now
        stream.reached[stream.number] += 1
        return stream.number, stream.reached[stream.number]

    def is_behind(self, work: tuple[int, int]) -> bool:
        """Whether what the current stream does next runs behind ``work``."""
        number, place = work
        return self.now.reached.get(number, 0) >= place


class Memory(SimpleNamespace):
    """A tensor of which only its users are noted."""

    def __init__(self) -> None:
        super().__init__(users=[])

    def record_stream(self, stream: Stream) -> None:
        """As torch's."""
        self.users.append(stream.number)
