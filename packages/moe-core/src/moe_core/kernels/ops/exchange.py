"""Tokens between GPUs whose memory is mapped into each other: pushed there, results pushed back, without the host.

Each rank has an :class:`ExchangeBuffer` of one size, with a row for each token that each rank may bring.  A call is

1. :func:`push_tokens`: each rank writes its tokens into the buffers of the ranks of their experts, then signals all
2. :func:`await_tokens`: until all have signalled; the experts run on ``ranks * capacity`` rows, of which those that
   nobody sent have experts -1
3. :func:`push_results`: each writes its part of the results into the buffers of the ranks that the tokens came from,
   then signals all
4. :func:`combine_results`: waits for all, and adds the parts in float32, ranks ascending

Nobody needs a barrier at the end.  Who combines has heard from all ranks that their experts are done with its tokens,
so it may send new ones; and who pushes results has heard from all that they send new tokens, so that they have combined
the old results.  That holds for each buffer by itself: calls that are under way at the same time take different ones.

The number of the call is counted on the device, so replays of CUDA graphs go on counting.
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

#: of kernels that wait
_WARPS = 4
#: most ranks: a thread of a block looks at each
MAX_RANKS = 32 * _WARPS
#: parts of a buffer that are kept as tensors
_MOST_VIEWS = 256
#: columns of a program that moves results
_BLOCK = 2048


@dataclass(frozen=True)
class ExchangeShape:
    """Sizes that all ranks have in common.

    ``ranks`` exchange up to ``capacity`` tokens each, of ``columns`` K values in ``dtype``, with ``top_k`` experts.
    ``results_room``: bytes that a buffer keeps for results, where calls of several shapes have it: who begins the next
    call writes tokens while others still add up results of the last one, so these never lie in the same bytes.
    """

    ranks: int
    capacity: int
    columns: int
    top_k: int
    dtype: torch.dtype
    results_room: int = 0

    @property
    def rows(self) -> int:
        """Tokens that can arrive."""
        return self.ranks * self.capacity

    @property
    def returned(self) -> int:
        """The byte where results start; signals are before them."""
        return 2 * self.signal_nbytes

    @property
    def signal_nbytes(self) -> int:
        """Of the signals of a step."""
        return -(-4 * self.ranks // 128) * 128

    @property
    def result_nbytes(self) -> int:
        return self.columns * self.dtype.itemsize

    @property
    def results_nbytes(self) -> int:
        """Bytes for results."""
        return max(self.results_room, -(-self.rows * self.result_nbytes // 256) * 256)

    @property
    def arrived(self) -> int:
        """The byte where tokens start."""
        return self.returned + self.results_nbytes

    def layout(self, code: TokenCode) -> TokenLayout:
        """Where the tokens lie."""
        return _layout(self, code)

    @property
    def nbytes(self) -> int:
        """Of a buffer; codes with their scales take no more than the values in 16 bits."""
        return self.nbytes_of(TokenCode(self.columns, self.dtype))

    def nbytes_of(self, code: TokenCode) -> int:
        """Of a buffer for tokens as ``code`` alone."""
        return self.arrived + self.layout(code).nbytes + 256

    def check(self, tokens: int, code: TokenCode, room: int | None = None) -> None:
        """Raise TensorError for more tokens than the capacity, or codes that a buffer of ``room`` bytes can't take.

        ``room``: default :attr:`nbytes`.
        """
        if tokens > self.capacity:
            raise TensorError(f"hidden_states has {tokens} tokens, the buffers are for {self.capacity} of each rank")
        needed, there = self.nbytes_of(code), self.nbytes if room is None else room
        if needed > there:
            raise TensorError(f"tokens as {code} take {needed} bytes, the buffers have {there}: take larger groups")


@functools.lru_cache(maxsize=512)
def _layout(shape: ExchangeShape, code: TokenCode) -> TokenLayout:
    """Asked several times in each call."""
    return TokenLayout.parts(code, shape.top_k, shape.rows, shape.arrived)


@dataclass(frozen=True, eq=False)
class ExchangeBuffer:
    """A rank's buffer, and how others' are reached.

    - ``memory`` [:attr:`ExchangeShape.nbytes` or more] uint8; signals are 0 at the start
    - ``addresses`` [ranks + 1] int64, on the device: where each rank's ``memory`` is, as this rank reaches it, and
      where ``alarm`` is
    - ``state`` [4 + ranks] int32 on the device, 0 at the start
    - ``alarm`` [ranks] int32, 0 at the start, in pinned memory: what the device tells the host, the step (1 there, 2
      back) in which each rank was waited for in vain
    - ``rank``: this one's number
    - ``views``: parts of the memory that calls have asked for; ``arrived``: where their tokens are; ``calls``: as calls
      of other shapes see the buffer
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
        return torch.zeros((4 + ranks,), dtype=torch.int32, device=device)

    @staticmethod
    def meta(shape: ExchangeShape) -> ExchangeBuffer:
        """Without memory, for launches that are recorded only."""
        memory = torch.empty((shape.nbytes,), dtype=torch.uint8, device="meta")
        addresses = torch.empty((shape.ranks + 1,), dtype=torch.int64, device="meta")
        alarm = torch.empty((shape.ranks,), dtype=torch.int32, device="meta")
        return ExchangeBuffer(shape, 0, memory, addresses, ExchangeBuffer.state_of(shape.ranks, "meta"), alarm)

    @property
    def missing(self) -> list[int]:
        """Ranks that were waited for in vain; what the device has told so far."""
        return [rank for rank, step in enumerate(self.alarm.tolist()) if step]

    def of_call(self, shape: ExchangeShape, code: TokenCode) -> ExchangeBuffer | None:
        """The buffer as a call of ``shape`` sees it; None where that does not fit in."""
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
        """A contiguous part of the memory; the same tensor for calls of the same sizes, which saves the host time."""
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
        """[rows, columns] of ``shape``: where results come back."""
        shape = self.shape
        return self.view(shape.returned, (shape.rows, shape.columns), shape.dtype)

    def signals(self, step: int) -> Tensor:
        """[ranks] int32: the call for which each rank has signalled, in step 1 or 2."""
        return self.view((step - 1) * self.shape.signal_nbytes, (self.shape.ranks,), torch.int32)


@dataclass(frozen=True, eq=False)
class ArrivedTokens:
    """Views of a buffer: ``hidden`` [R, K] with ``scale`` [R, groups] where it is codes, ``weights`` [R, k] float32,
    ``experts`` [R, k] int32 local numbers or -1, ``adapters`` [R] int32; R = ranks * capacity.

    Of rows without an expert only ``experts`` has a meaning.
    """

    hidden: Tensor
    scale: Tensor | None
    weights: Tensor
    experts: Tensor
    adapters: Tensor


def arrived_tokens(buffer: ExchangeBuffer, code: TokenCode) -> ArrivedTokens:
    """The tokens in ``buffer``, there after :func:`await_tokens`."""
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
    """Quantise tokens into the buffers of the ranks of their experts, and signal; places [M, ranks] int32 of results.

    Arguments as of :func:`moe_core.kernels.ops.dispatch.pack_tokens`; M is at most the capacity, and may be 0.
    ``places``: where these are written, by default new memory.
    Raises TensorError for more tokens, or codes that do not fit the buffer.
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
    """Wait on the device, at most ``timeout`` seconds, until all ranks have pushed their tokens."""
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
    """Write ``partial`` [R, K], the weighted sums of this rank's experts, to where the tokens came from, and signal.

    ``experts`` [R, k]: of :class:`ArrivedTokens`.
    """
    from moe_core.kernels.ops._dispatch_kernels import return_kernel
    from moe_core.kernels.ops._dispatch_launch import MOST_COUNTED, launch_signal

    shape = buffer.shape
    if tuple(partial.shape) != (shape.rows, shape.columns) or partial.dtype != shape.dtype:
        raise TensorError(
            f"results are {partial.dtype} {list(partial.shape)}, expected {shape.dtype} {[shape.rows, shape.columns]}"
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
    """Wait for the results of all ranks, and write ``output`` [M, K], their sums in float32, ranks ascending.

    ``places``: of :func:`push_tokens`.  Where a rank has not come within ``timeout`` seconds, in this call or before,
    all of the output is NaN.
    """
    from moe_core.kernels.ops._dispatch_kernels import combine_kernel
    from moe_core.kernels.ops._dispatch_launch import MOST_COUNTED

    shape = buffer.shape
    # a rank without tokens waits too: nobody may write into a buffer that others have not finished with
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
    """(columns of a program, warps)."""
    block = min(power_of_two(columns), _BLOCK)
    return block, max(1, min(8, block // 256))


def _nanoseconds(seconds: float) -> int:
    return max(int(seconds * 1e9), 1)
