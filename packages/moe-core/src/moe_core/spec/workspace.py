"""Scratch memory of a fused MoE call: stated by the experts, owned by the caller.

A call without a workspace of the caller's takes one from torch's caching allocator; under CUDA-graph
capture that is the graph's own pool.  An engine that runs many layers shares one
:class:`Workspace` among them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_core._support.stream_order import StreamOrder
from moe_core.errors import TensorError, check_instance, check_tensor
from moe_core.spec.device import as_torch_device

#: every part starts at a multiple of this many bytes: the widest alignment that TMA and vector loads ask for
ALIGNMENT = 256
#: in the state of a pickled workspace: its bytes
_RESERVED = "reserved"
#: what no copy has: it belongs to calls, and to graphs that were captured with this one's memory
_OF_THIS_ONE = frozenset({"lock", "_order", "_kept", "_captured"})


@dataclass(frozen=True)
class WorkspaceSpec:
    """One scratch tensor: its name, shape and dtype.

    ``phase``: the part of a call outside of which nothing is kept there, counted from 0; None: no such part.  Tensors
    of different phases share memory.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    phase: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def workspace_nbytes(specs: Iterable[WorkspaceSpec]) -> int:
    """Bytes of one buffer that holds all ``specs``, each aligned: no fewer where a spec is larger."""
    return _layout(specs)[1]


def _layout(specs: Iterable[WorkspaceSpec]) -> tuple[list[tuple[WorkspaceSpec, int]], int]:
    """Each spec with its first byte, and the bytes of all.  Every phase begins behind what has none."""
    offsets: dict[int | None, int] = {None: 0}
    inside = []
    for spec in specs:
        offset = offsets.setdefault(spec.phase, 0)
        inside.append((spec, offset))
        offsets[spec.phase] = offset + -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    shared = offsets.pop(None)
    placed = [(spec, offset if spec.phase is None else shared + offset) for spec, offset in inside]
    return placed, shared + max(offsets.values(), default=0)


class Workspace:
    """A flat buffer that grows to the largest request and is handed out as named tensors.

    Growing replaces the buffer.  One that a CUDA graph was captured with is kept as long as the workspace, since
    replays go on using its address; :meth:`reserve` before capturing saves that memory.

    Calls may be made on several streams, and by several threads: each runs behind the one before it.  Streams that
    shall run at the same time need a workspace each.  Replays of CUDA graphs are not seen: who replays them on another
    stream than calls are made on orders them, as with all memory that a graph writes.  A ``buffer`` of the caller's is
    ordered from the first call with this workspace on, and not across several workspaces that share it.

    Args:
        device: Where the memory is.
        buffer: uint8 [bytes] of the caller's, which is never replaced; None: memory of torch's allocator.
    """

    def __init__(self, device: torch.device | str, buffer: Tensor | None = None) -> None:
        self._begin()
        self.device = as_torch_device(device)
        self._fixed = buffer is not None
        if buffer is not None:
            check_tensor("buffer", buffer)
            if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
                raise TensorError(
                    f"a workspace buffer is contiguous uint8 [bytes], got {buffer.dtype} {list(buffer.shape)}"
                )
            if buffer.device.type != self.device.type:
                raise TensorError(f"the workspace is for {self.device}, its buffer is on {buffer.device}")
        self._buffer = buffer if buffer is not None else torch.empty(0, dtype=torch.uint8, device=self.device)
        #: bytes of the last :meth:`take`
        self.taken = 0

    def _begin(self) -> None:
        #: held from :meth:`hold` until the last kernel is launched: kernels of two calls must not alternate
        self.lock = threading.RLock()
        self._order = StreamOrder()
        self._captured = False
        self._kept: list[Tensor] = []

    def __getstate__(self) -> dict[str, Any]:
        # a copy has memory of its own
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_ONE}
        return state if self._fixed else state | {"_buffer": self._buffer.new_empty(0), _RESERVED: self.nbytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        self.__dict__.update({name: value for name, value in state.items() if name != _RESERVED})
        self.device = self._buffer.device  # where it was put: torch.load may map it elsewhere
        if not self._fixed:
            self.reserve(state[_RESERVED])

    @property
    def captured(self) -> bool:
        """Whether CUDA graphs were captured with its memory."""
        return self._captured or bool(self._kept)

    @property
    def place(self) -> torch.device:
        """Where the memory is, with the device's number."""
        return self._buffer.device

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def reserve(self, nbytes: int) -> None:
        """Grow to at least ``nbytes`` now.  Raises TensorError if the buffer is the caller's and too small."""
        check_instance("nbytes", nbytes, int)
        if nbytes >= 2**63:
            raise TensorError(f"nbytes is {nbytes}, expected less than 2^63: no memory has as many")
        if nbytes > self._buffer.numel():
            self._grow(nbytes)
            if self.device.type == "cuda":
                # new memory is of the current stream: others wait for what this one had there before
                self._order.follow(self._buffer.device)

    def _grow(self, nbytes: int) -> None:
        if self._fixed:
            raise TensorError(f"the workspace has {self._buffer.numel()} bytes, {nbytes} are needed")
        with self.lock:
            if self._captured:
                self._kept.append(self._buffer)
                self._captured = False
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            # nobody has used it: the old memory is kept by torch until its streams are done
            self._order = StreamOrder()

    def hold(self, nbytes: int) -> Tensor:
        """The buffer, of at least ``nbytes``, for what is launched on the current stream until :attr:`lock` is free.

        Work of earlier calls on other streams is waited for, on the device.  The buffer stays if a CUDA graph is being
        captured.
        """
        if nbytes > self._buffer.numel():
            self._grow(nbytes)
        if self.device.type == "cuda" and self._order.follow(self._buffer.device, self._buffer):
            self._captured = True
        return self._buffer

    def take(self, specs: Iterable[WorkspaceSpec]) -> Mapping[str, Tensor]:
        """Tensors for ``specs`` by name; uninitialised, and shared with every other ``take``."""
        placed, self.taken = _layout(specs)
        buffer = self.hold(self.taken)
        tensors: dict[str, Tensor] = {}
        for spec, offset in placed:
            part = buffer[offset : offset + spec.nbytes]
            tensors[spec.name] = part.view(spec.dtype).view(spec.shape)
        return tensors
