"""Exchange tokens and results between GPUs through peer-mapped memory, without the host.

Each rank has an :class:`ExchangeBuffer` of the same size, with one row for each token that each rank may send. A call
has four steps:

1. :func:`push_tokens`: each rank writes its tokens into the buffers of the ranks that hold their experts, then signals
   all ranks
2. :func:`await_tokens`: waits until all ranks have signaled; the experts run on ``ranks * capacity`` rows, in which
   rows without a token have experts -1
3. :func:`push_results`: each rank writes its partial results into the buffers of the ranks that own the tokens, then
   signals all ranks
4. :func:`combine_results`: waits for all ranks and adds the partial results in float32, ranks ascending

No final barrier is needed. A rank that combines has received the signal of all ranks that their experts are done with
its tokens, so it may send new ones. A rank that pushes results has received the signal of all ranks that they are
sending new tokens, so they have combined the previous results. This holds for each buffer separately: concurrent calls
use different buffers.

The number of the call is counted on the device, so replays of a CUDA graph continue the count.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_core.errors import TensorError
from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops._sizes import power_of_two
from moe_core.kernels.ops.token_layout import TokenCode, TokenLayout

if TYPE_CHECKING:
    from moe_core.parallel.placement.tables import ReplicaTables

#: warps of the kernels that wait
_WARPS = 4
#: largest number of ranks: one thread of a CTA polls the signal of each rank
MAX_RANKS = 32 * _WARPS
#: largest number of cached views of a buffer
_MOST_VIEWS = 256
#: columns per program of the kernels that move results
_BLOCK = 2048


@dataclass(frozen=True)
class ExchangeShape:
    """Sizes that all ranks have in common.

    Attributes:
        ranks: Number of ranks.
        capacity: Largest number of tokens that each rank sends.
        columns: Values per token, K.
        top_k: Experts per token.
        dtype: Dtype of hidden states and results.
        results_room: Bytes that a buffer reserves for results if calls of several shapes share it. Tokens and results
            must never overlap: a rank that begins the next call writes tokens while others still combine results of the
            previous call.
    """

    ranks: int
    capacity: int
    columns: int
    top_k: int
    dtype: torch.dtype
    results_room: int = 0

    @property
    def rows(self) -> int:
        """Largest number of tokens that can arrive."""
        return self.ranks * self.capacity

    @property
    def returned(self) -> int:
        """Byte offset of the results; the signals precede them."""
        return 2 * self.signal_nbytes

    @property
    def signal_nbytes(self) -> int:
        """Bytes of the signals of one step."""
        return -(-4 * self.ranks // 128) * 128

    @property
    def result_nbytes(self) -> int:
        """Bytes of one row of results."""
        return self.columns * self.dtype.itemsize

    @property
    def results_nbytes(self) -> int:
        """Bytes reserved for results."""
        return max(self.results_room, -(-self.rows * self.result_nbytes // 256) * 256)

    @property
    def arrived(self) -> int:
        """Byte offset of the tokens."""
        return self.returned + self.results_nbytes

    def layout(self, code: TokenCode) -> TokenLayout:
        """Return the layout of the tokens in the buffer.

        Args:
            code: Storage format of the hidden states.

        Returns:
            Layout with offsets from the start of the buffer.
        """
        return _layout(self, code)

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer; quantized codes with their scales take no more than 16-bit values."""
        return self.nbytes_of(TokenCode(self.columns, self.dtype))

    def nbytes_of(self, code: TokenCode) -> int:
        """Return the bytes of a buffer for tokens in one storage format.

        Args:
            code: Storage format of the hidden states.

        Returns:
            Size of the buffer.
        """
        return self.arrived + self.layout(code).nbytes + 256

    def check(self, tokens: int, code: TokenCode, room: int | None = None) -> None:
        """Check that a call fits the buffers.

        Args:
            tokens: Number of tokens of this rank.
            code: Storage format of the hidden states.
            room: Capacity of the buffer in bytes; :attr:`nbytes` by default.

        Raises:
            TensorError: If there are more tokens than the capacity, or the tokens do not fit the buffer.
        """
        if tokens > self.capacity:
            raise TensorError(
                f"hidden_states has {tokens} tokens, expected at most {self.capacity} per rank, the capacity "
                "of the buffers"
            )
        needed, there = self.nbytes_of(code), self.nbytes if room is None else room
        if needed > there:
            raise TensorError(
                f"tokens quantized to {code} need {needed} bytes, but the buffers have {there}: use larger scale groups"
            )


@functools.lru_cache(maxsize=512)
def _layout(shape: ExchangeShape, code: TokenCode) -> TokenLayout:
    """Compute the layout; cached because each call needs it several times."""
    return TokenLayout.parts(code, shape.top_k, shape.rows, shape.arrived)


@dataclass(frozen=True, eq=False)
class ExchangeBuffer:
    """A rank's buffer, and the addresses of its peers' buffers.

    Attributes:
        shape: Common sizes.
        rank: Number of this rank.
        memory: Buffer [:attr:`ExchangeShape.nbytes` or more], uint8; the signals are initially 0.
        addresses: Device tensor [ranks + 1], int64: the address of each rank's ``memory`` as mapped on this rank, then
            the address of ``alarm``.
        state: Device tensor [4 + ranks], int32, initially 0.
        alarm: Tensor [ranks] in pinned memory, int32, initially 0: the step (1 tokens, 2 results) in which waiting for
            each rank timed out. The device writes it for the host.
        views: Cached views of the memory.
        calls: The buffer as seen by calls of other shapes.
        arrived: Cached views of arrived tokens, by storage format.
    """

    shape: ExchangeShape
    rank: int
    memory: Tensor
    addresses: Tensor
    state: Tensor
    alarm: Tensor
    views: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = field(default_factory=dict, repr=False)
    calls: dict[tuple[ExchangeShape, TokenCode], ExchangeBuffer] = field(default_factory=dict, repr=False)
    arrived: dict[TokenCode, ArrivedTokens] = field(default_factory=dict, repr=False)

    @staticmethod
    def state_of(ranks: int, device: torch.device | str) -> Tensor:
        """Allocate :attr:`state`.

        Args:
            ranks: Number of ranks.
            device: Device of the buffer.

        Returns:
            Zeros [4 + ranks], int32.
        """
        return torch.zeros((4 + ranks,), dtype=torch.int32, device=device)

    @staticmethod
    def meta(shape: ExchangeShape) -> ExchangeBuffer:
        """Create a buffer without memory, for recording launches.

        Args:
            shape: Common sizes.

        Returns:
            A buffer on the meta device.
        """
        memory = torch.empty((shape.nbytes,), dtype=torch.uint8, device="meta")
        addresses = torch.empty((shape.ranks + 1,), dtype=torch.int64, device="meta")
        alarm = torch.empty((shape.ranks,), dtype=torch.int32, device="meta")
        return ExchangeBuffer(shape, 0, memory, addresses, ExchangeBuffer.state_of(shape.ranks, "meta"), alarm)

    @property
    def missing(self) -> list[int]:
        """Ranks for which waiting has timed out, as far as the device has reported."""
        return [rank for rank, step in enumerate(self.alarm.tolist()) if step]

    def of_call(self, shape: ExchangeShape, code: TokenCode) -> ExchangeBuffer | None:
        """Return the buffer as seen by a call of another shape.

        Args:
            shape: Sizes of the call.
            code: Storage format of the hidden states.

        Returns:
            The buffer, or None if the call does not fit.
        """
        found = self.calls.get((shape, code))
        if found is None:
            there = self.shape.results_nbytes
            inside = replace(shape, results_room=there)
            if shape.results_nbytes > there or inside.nbytes_of(code) > self.memory.shape[0]:
                return None
            if len(self.calls) >= _MOST_VIEWS:
                self.calls.clear()
            found = self.calls[shape, code] = replace(self, shape=inside, calls={}, arrived={})
        return found

    def view(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous view of the memory, cached to save host time.

        Args:
            start: Byte offset.
            shape: Shape of the view.
            dtype: Dtype of the view.

        Returns:
            The view; the same tensor for the same arguments.
        """
        found = self.views.get((start, shape, dtype))
        if found is None:
            if len(self.views) >= _MOST_VIEWS:
                self.views.clear()
            nbytes = math.prod(shape) * dtype.itemsize
            found = self.memory[start : start + nbytes].view(dtype).view(shape)
            self.views[start, shape, dtype] = found
        return found

    @property
    def results(self) -> Tensor:
        """Results [rows, columns] that ranks have returned."""
        shape = self.shape
        return self.view(shape.returned, (shape.rows, shape.columns), shape.dtype)

    def signals(self, step: int) -> Tensor:
        """Return the signals of a step.

        Args:
            step: 1 for tokens, 2 for results.

        Returns:
            Number of the call for which each rank has signaled [ranks], int32.
        """
        return self.view((step - 1) * self.shape.signal_nbytes, (self.shape.ranks,), torch.int32)


@dataclass(frozen=True, eq=False)
class ArrivedTokens:
    """Views of the tokens in a buffer; R = ranks * capacity rows.

    In rows without an expert only ``experts`` is meaningful.

    Attributes:
        hidden: Hidden states [R, K].
        scale: Scales [R, groups] if ``hidden`` holds quantized codes, else None.
        weights: Router weights [R, k], float32.
        experts: Local expert numbers [R, k], int32; -1 for none.
        adapters: LoRA adapters [R], int32.
    """

    hidden: Tensor
    scale: Tensor | None
    weights: Tensor
    experts: Tensor
    adapters: Tensor


def arrived_tokens(buffer: ExchangeBuffer, code: TokenCode) -> ArrivedTokens:
    """Return the tokens in a buffer, valid after :func:`await_tokens`.

    Args:
        buffer: The buffer of this rank.
        code: Storage format of the hidden states.

    Returns:
        Views of the buffer.
    """
    found = buffer.arrived.get(code)
    if found is not None:
        return found
    shape, layout = buffer.shape, buffer.shape.layout(code)
    rows, top_k = shape.rows, shape.top_k
    buffer.arrived[code] = found = ArrivedTokens(
        buffer.view(layout.hidden[0], (rows, code.columns), code.code_dtype),
        None if code.key is None else buffer.view(layout.scale[0], (rows, code.groups), code.scale_dtype),
        buffer.view(layout.weights[0], (rows, top_k), torch.float32),
        buffer.view(layout.experts[0], (rows, top_k), torch.int32),
        buffer.view(layout.adapters[0], (rows,), torch.int32),
    )
    return found


def push_tokens(
    buffer: ExchangeBuffer,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    tables: ReplicaTables,
    code: TokenCode,
    *,
    copies: int = 1,
    offset: int = 0,
    adapter_ids: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Quantize tokens into the buffers of the ranks that hold their experts, and signal.

    Args:
        buffer: The buffer of this rank.
        x: Hidden states [M, K]; M is at most the capacity and may be 0.
        topk_ids: As in :func:`moe_core.kernels.ops.dispatch.pack_tokens`.
        topk_weights: As in :func:`moe_core.kernels.ops.dispatch.pack_tokens`.
        tables: As in :func:`moe_core.kernels.ops.dispatch.pack_tokens`.
        code: As in :func:`moe_core.kernels.ops.dispatch.pack_tokens`.
        copies: As in :func:`moe_core.kernels.ops.dispatch.pack_tokens`.
        offset: As in :func:`moe_core.kernels.ops.dispatch.pack_tokens`.
        adapter_ids: As in :func:`moe_core.kernels.ops.dispatch.pack_tokens`.
        places: Tensor [M, ranks] int32 to write to; allocated by default.

    Returns:
        Rows [M, ranks] int32 in which the results of each token will arrive.

    Raises:
        TensorError: If there are more tokens than the capacity, or the tokens do not fit the buffer.
    """
    from moe_core.kernels.ops._dispatch_launch import launch_dispatch

    shape = buffer.shape
    tokens = x.shape[0]
    shape.check(tokens, code, buffer.memory.shape[0])
    if places is None:
        places = torch.empty((tokens, shape.ranks), dtype=torch.int32, device=x.device)
    launch_dispatch(
        x,
        topk_ids,
        topk_weights,
        adapter_ids,
        tables,
        code,
        shape.layout(code),
        places,
        rows=shape.capacity,
        ranks=shape.ranks,
        copies=copies,
        offset=offset,
        addresses=buffer.addresses,
        state=buffer.state,
        signals=0,
        me=buffer.rank,
    )
    return places


def await_tokens(buffer: ExchangeBuffer, *, timeout: float) -> None:
    """Wait on the device until all ranks have pushed their tokens.

    Args:
        buffer: The buffer of this rank.
        timeout: Limit in seconds.
    """
    _wait(buffer, 1, timeout)


def _wait(buffer: ExchangeBuffer, step: int, timeout: float) -> None:
    from moe_core.kernels.ops._dispatch_kernels import wait_kernel

    launch(
        wait_kernel,
        (1,),
        buffer.signals(step),
        buffer.state,
        buffer.addresses,
        step,
        buffer.shape.ranks,
        _nanoseconds(timeout),
        THREADS=32 * _WARPS,
        num_warps=_WARPS,
    )


def push_results(buffer: ExchangeBuffer, partial: Tensor, experts: Tensor) -> None:
    """Write partial results to the ranks that own the tokens, and signal.

    Args:
        buffer: The buffer of this rank.
        partial: Weighted sums over this rank's experts [R, K].
        experts: Local expert numbers [R, k] of :class:`ArrivedTokens`.

    Raises:
        TensorError: If ``partial`` has the wrong shape or dtype.
    """
    from moe_core.kernels.ops._dispatch_kernels import return_kernel
    from moe_core.kernels.ops._dispatch_launch import MOST_COUNTED, launch_signal

    shape = buffer.shape
    if tuple(partial.shape) != (shape.rows, shape.columns) or partial.dtype != shape.dtype:
        raise TensorError(
            f"partial is {partial.dtype} {list(partial.shape)}, expected {shape.dtype} {[shape.rows, shape.columns]}"
        )
    block, warps = _columns(shape.columns)
    chunks = -(-shape.columns // block)
    last_signals = shape.rows * chunks <= MOST_COUNTED
    launch(
        return_kernel,
        (shape.rows, chunks),
        partial,
        experts,
        buffer.addresses,
        buffer.state,
        shape.signal_nbytes,
        shape.returned,
        shape.result_nbytes,
        shape.columns,
        partial.stride(0),
        shape.ranks,
        buffer.rank,
        shape.capacity,
        TOP_K=shape.top_k,
        BLOCK_K=power_of_two(shape.top_k),
        BLOCK=block,
        BLOCK_W=power_of_two(shape.ranks),
        ALIGNED=shape.result_nbytes % 16 == 0,
        SIGNAL=last_signals,
        num_warps=warps,
    )
    if not last_signals:
        launch_signal(buffer.addresses, buffer.state, shape.signal_nbytes, buffer.rank, shape.ranks, begins=False)


def combine_results(buffer: ExchangeBuffer, places: Tensor, output: Tensor, *, timeout: float) -> None:
    """Wait for the results of all ranks, and add them in float32, ranks ascending.

    If waiting for a rank times out, in this call or an earlier one, the whole output is NaN.

    Args:
        buffer: The buffer of this rank.
        places: Rows that :func:`push_tokens` returned.
        output: Output [M, K].
        timeout: Limit in seconds.
    """
    from moe_core.kernels.ops._dispatch_kernels import combine_kernel
    from moe_core.kernels.ops._dispatch_launch import MOST_COUNTED

    shape = buffer.shape
    # a rank without tokens waits too: no rank may write into a buffer that others are still reading
    tokens, columns = output.shape
    if tokens == 0:
        _wait(buffer, 2, timeout)
        return
    block, warps = min(power_of_two(columns), 512), _WARPS
    each_waits = tokens * -(-columns // block) <= MOST_COUNTED
    if not each_waits:
        _wait(buffer, 2, timeout)
        block, warps = _columns(columns)
    returned = buffer.results
    launch(
        combine_kernel,
        (tokens, -(-columns // block)),
        returned,
        places,
        output,
        buffer.signals(2),
        buffer.state,
        buffer.addresses,
        columns,
        returned.stride(0),
        output.stride(0),
        shape.ranks,
        _nanoseconds(timeout),
        BLOCK=block,
        THREADS=32 * _WARPS,
        WAIT=each_waits,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def _columns(columns: int) -> tuple[int, int]:
    """Return (columns per program, warps)."""
    block = min(power_of_two(columns), _BLOCK)
    return block, max(1, min(8, block // 256))


def _nanoseconds(seconds: float) -> int:
    return max(int(seconds * 1e9), 1)
