"""Low-latency exchange of decode tokens between the GPUs of one host, without the host.

Tokens are written directly into each other's memory; see :mod:`moe_core.kernels.ops.exchange` for the steps. Shapes are
fixed (``max_num_tokens`` rows per rank), so ranks with different numbers of tokens, or none, replay the same CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial as bound
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_core._support.async_result import AsyncResult
from moe_core.errors import ConfigError
from moe_core.interface.prepare_finalize_claims import PrepareFinalizeClaims
from moe_core.kernels.ops.exchange import MAX_RANKS, ExchangeBuffer, ExchangeShape
from moe_core.parallel.prepare_finalize.pushed import PushedPrepareAndFinalize, PushedTokens
from moe_core.parallel.prepare_finalize.token_rows import Tokens
from moe_core.spec.config import FusedMoEConfig, TokenSharing
from moe_core.spec.device import cuda
from moe_core.spec.quant_key import QuantKey

if TYPE_CHECKING:
    from moe_core.parallel.distributed.groups import ParallelGroups
    from moe_core.parallel.distributed.symmetric import ExchangeBuffers
    from moe_core.parallel.placement.placement import ExpertPlacement


class LowLatencyPrepareAndFinalize(PushedPrepareAndFinalize):
    """Push tokens, push results, wait on the device.

    Two calls may be in flight at the same time. If a rank does not participate within the timeout of the groups, the
    output is NaN, and the next call (or :meth:`check`, for replays of CUDA graphs) raises CommunicationError.

    Args:
        config: Config of the layer; must have ``max_num_tokens``.
        groups: Process groups of the layer.
        placement: Placement of experts.
        buffers: Existing exchange buffers. Default: those shared by layers of the same sizes, created by
            :meth:`connect`.

    Raises:
        ConfigError: ``max_num_tokens`` is missing, or the groups do not fit.
    """

    name = "low_latency"
    claims = PrepareFinalizeClaims(
        frozenset({TokenSharing.EP_RANK, TokenSharing.NONE}),
        devices=(cuda(80),),
        quantizes=True,
        batch_invariant=True,
        bounded=True,
        max_ranks=MAX_RANKS,
        one_domain=True,
        verified_on=("2 × NVIDIA H200 (sm90)",),
    )
    fallback = "allgather_reducescatter"
    empty_rows = True

    def __init__(
        self,
        config: FusedMoEConfig,
        groups: ParallelGroups | None = None,
        *,
        placement: ExpertPlacement | None = None,
        buffers: ExchangeBuffers | None = None,
    ) -> None:
        super().__init__(config, groups, placement=placement)
        if config.max_num_tokens is None:
            raise ConfigError(f"{self.name} needs max_num_tokens in the config, the largest number of tokens per rank")
        self.shape = ExchangeShape(
            self.ranks.parallel.dp_size, config.max_num_tokens, config.hidden_size, config.top_k, config.dtype
        )
        self._nbytes = self.shape.nbytes
        self._buffers = buffers

    @classmethod
    def unavailable(cls, groups: ParallelGroups, device: torch.device, own: list[str]) -> list[str]:
        from moe_core.parallel.distributed.symmetric import reasons_against

        return reasons_against(groups, device, own)

    def connect(self, device: torch.device) -> None:
        """Map the memory of the other ranks; otherwise done by the first call.

        All ranks call it at the same time.

        Args:
            device: Device of this rank.
        """
        if self._buffers is None:
            from moe_core.parallel.distributed.symmetric import ExchangeBuffers

            self._buffers = ExchangeBuffers.connect(self.shape, self.exchange, device)
            self.destinations.tables(device)

    @property
    def missing(self) -> list[int]:
        return [] if self._buffers is None else self._buffers.missing

    def max_tokens(self, num_tokens: int) -> int:
        return self.shape.rows

    def take(
        self, hidden_states: Tensor, tokens_per_rank: Sequence[int] | None, quantize_as: QuantKey | None
    ) -> PushedTokens:
        tokens = hidden_states.shape[0]
        self.check_own(tokens, tokens_per_rank)
        form = self.form_of(self.shape.capacity, hidden_states, quantize_as)
        if tokens > self.shape.capacity or form.nbytes > self._nbytes:
            self.shape.check(tokens, form.code)
        if hidden_states.is_meta:
            return self.handle(form, ExchangeBuffer.meta(self.shape), hidden_states, lambda: None)
        self.connect(hidden_states.device)
        self.check()
        buffers = self._buffers
        if buffers is None:
            raise ConfigError("shared memory of the other ranks is not mapped")
        number = buffers.take()
        return self.handle(form, buffers.buffers[number], hidden_states, bound(buffers.release, number))

    def dispatch(
        self, tokens: Tokens, tokens_per_rank: Sequence[int] | None, quantize_as: QuantKey | None, *, gaps: bool
    ) -> AsyncResult[tuple[Tokens, object]]:
        return self.push(tokens, self.take(tokens.hidden_states, tokens_per_rank, quantize_as))

    def combine(self, output: Tensor, partial: Tensor, handle: object) -> AsyncResult[None]:
        if not isinstance(handle, PushedTokens):
            raise TypeError(f"combine got {handle!r}, expected what dispatch returned")
        return self.push_back(handle, output, partial)
