"""Workspace of a fused MoE call: sized by the experts, owned by the caller.

If the caller passes no workspace, the call allocates one from torch's caching allocator; under CUDA-graph capture
that is the graph's own pool. An engine that runs many layers shares one :class:`Workspace` among them.
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

#: Alignment of every tensor in bytes: the widest that TMA and vector loads require.
ALIGNMENT = 256
#: Key of a pickled workspace's size in bytes.
_RESERVED = "reserved"
#: Attributes that are not copied: they belong to calls, and to graphs captured with this workspace's memory.
_OF_THIS_ONE = frozenset({"lock", "_order", "_kept", "_captured"})


@dataclass(frozen=True)
class WorkspaceSpec:
    """Name, shape and dtype of one scratch tensor.

    Attributes:
        name: Name of the tensor.
        shape: Its shape.
        dtype: Its dtype.
        phase: Index of the only phase of a call that uses the tensor, counted from 0; None: the tensor lives for the
            whole call. Tensors of different phases share memory.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    phase: int | None = None

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes, without alignment."""
        return math.prod(self.shape) * self.dtype.itemsize


class WorkspaceLayout:
    """Places of scratch tensors in one buffer, each aligned.

    Every phase starts after the tensors that have no phase. The size is monotonic: it never shrinks when a spec grows.

    Args:
        specs: The scratch tensors.

    Attributes:
        nbytes: Size of the buffer in bytes.
        places: First byte, byte after the last one, name, dtype and shape of each tensor.
    """

    def __init__(self, specs: Iterable[WorkspaceSpec]) -> None:
        offsets: dict[int | None, int] = {None: 0}
        inside = []
        for spec in specs:
            offset = offsets.setdefault(spec.phase, 0)
            inside.append((spec, offset, spec.nbytes))
            offsets[spec.phase] = offset + -(-inside[-1][2] // ALIGNMENT) * ALIGNMENT
        shared = offsets.pop(None)
        self.nbytes = shared + max(offsets.values(), default=0)
        self.places: list[tuple[int, int, str, torch.dtype, tuple[int, ...]]] = []
        for spec, offset, nbytes in inside:
            start = offset if spec.phase is None else shared + offset
            self.places.append((start, start + nbytes, spec.name, spec.dtype, spec.shape))

    def tensors(self, buffer: Tensor) -> Mapping[str, Tensor]:
        """Return the scratch tensors in a buffer.

        Args:
            buffer: uint8, of at least :attr:`nbytes`.

        Returns:
            Tensors by name.
        """
        return {name: buffer[start:end].view(dtype).view(shape) for start, end, name, dtype, shape in self.places}


def workspace_nbytes(specs: Iterable[WorkspaceSpec]) -> int:
    """Compute the size of one buffer that holds all ``specs``, each aligned.

    Args:
        specs: The scratch tensors.

    Returns:
        Size in bytes.
    """
    return WorkspaceLayout(specs).nbytes


class Workspace:
    """Flat buffer that grows to the largest request and is handed out as named tensors.

    Growing replaces the buffer. A buffer that a CUDA graph was captured with is kept as long as the workspace,
    because replays keep using its address. Calling :meth:`reserve` before the capture saves that memory.

    Several streams and threads may make calls: each call runs after the previous one. Streams that must run
    concurrently need separate workspaces. Replays of CUDA graphs are not tracked: if you replay on another stream
    than the one calls are made on, order the two yourself, as for all memory that a graph writes. A caller's
    ``buffer`` is ordered from the first call with this workspace, and not across several workspaces that share it.

    Args:
        device: Device of the memory.
        buffer: Caller's uint8 [bytes] buffer, which is never replaced; None: allocate from torch.
    """

    def __init__(self, device: torch.device | str, buffer: Tensor | None = None) -> None:
        self._begin()
        self.device = as_torch_device(device)
        self._fixed = buffer is not None
        if buffer is not None:
            check_tensor("buffer", buffer)
            if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
                raise TensorError(f"buffer must be contiguous uint8 [bytes], got {buffer.dtype} {list(buffer.shape)}")
            if buffer.device.type != self.device.type:
                raise TensorError(f"buffer is on {buffer.device}, but the workspace is on {self.device}")
        self._buffer = buffer if buffer is not None else torch.empty(0, dtype=torch.uint8, device=self.device)
        #: Bytes used by the last :meth:`take`.
        self.taken = 0

    def _begin(self) -> None:
        #: Held from :meth:`hold` until the last kernel is launched: kernels of two calls must not interleave.
        self.lock = threading.RLock()
        self._order = StreamOrder()
        self._captured = False
        self._kept: list[Tensor] = []

    def __getstate__(self) -> dict[str, Any]:
        # A copy allocates separate memory.
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_THIS_ONE}
        return state if self._fixed else state | {"_buffer": self._buffer.new_empty(0), _RESERVED: self.nbytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        self.__dict__.update({name: value for name, value in state.items() if name != _RESERVED})
        self.device = self._buffer.device  # The device follows the buffer: torch.load may map it elsewhere.
        if not self._fixed:
            self.reserve(state[_RESERVED])

    @property
    def captured(self) -> bool:
        """Whether CUDA graphs were captured with this workspace's memory."""
        return self._captured or bool(self._kept)

    @property
    def place(self) -> torch.device:
        """Device of the memory, with its index."""
        return self._buffer.device

    @property
    def nbytes(self) -> int:
        """Current size of the buffer in bytes."""
        return self._buffer.numel()

    def reserve(self, nbytes: int) -> None:
        """Grow the buffer to at least ``nbytes`` now.

        Args:
            nbytes: Size in bytes.

        Raises:
            TensorError: The buffer is the caller's and too small, or ``nbytes`` is 2^63 or more.
        """
        check_instance("nbytes", nbytes, int)
        if nbytes >= 2**63:
            raise TensorError(f"nbytes is {nbytes}, expected less than 2^63")
        if nbytes > self._buffer.numel():
            self._grow(nbytes)
            if self.device.type == "cuda":
                # New memory belongs to the current stream: other streams must wait for the work that used it here
                # before.
                self._order.follow(self._buffer.device)

    def _grow(self, nbytes: int) -> None:
        if self._fixed:
            raise TensorError(f"the workspace has {self._buffer.numel()} bytes, but {nbytes} are needed")
        with self.lock:
            if self._captured:
                self._kept.append(self._buffer)
                self._captured = False
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            # No call has used the new memory; torch keeps the old memory until its streams are done.
            self._order = StreamOrder()

    def hold(self, nbytes: int) -> Tensor:
        """Return the buffer for launches on the current stream until :attr:`lock` is released.

        The device waits for the work of earlier calls on other streams. A buffer that is used during a CUDA graph
        capture is kept.

        Args:
            nbytes: Minimum size in bytes.

        Returns:
            uint8 buffer of at least ``nbytes``.

        Raises:
            TensorError: The buffer is the caller's and too small.
        """
        if nbytes > self._buffer.numel():
            self._grow(nbytes)
        if self.device.type == "cuda" and self._order.follow(self._buffer.device, self._buffer):
            self._captured = True
        return self._buffer

    def take(self, specs: Iterable[WorkspaceSpec] | WorkspaceLayout) -> Mapping[str, Tensor]:
        """Return uninitialized tensors for ``specs``; every other ``take`` shares their memory.

        Args:
            specs: The scratch tensors, or their layout if it is known from an earlier call.

        Returns:
            Tensors by name.

        Raises:
            TensorError: The buffer is the caller's and too small.
        """
        layout = specs if isinstance(specs, WorkspaceLayout) else WorkspaceLayout(specs)
        self.taken = layout.nbytes
        return layout.tensors(self.hold(self.taken))
