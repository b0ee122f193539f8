"""Prepare/finalize with DeepEP, if it is installed: its ``ElasticBuffer`` dispatches tokens.

Over NVLink a token is sent once to each rank, over a network once to each host.

Written for ``deep_ep`` 2 (``dispatch`` and ``combine`` without expansion), whose documentation states:

- ``dispatch`` takes x [M, K] in bfloat16, or (e4m3 codes, float32 scales [M, groups]); ids [M, k] int64, -1 for none,
  distinct in a row, with k at most 32; weights [M, k] float32. It sends each token once per rank, and returns local ids
  (-1 for experts of other ranks) and a handle.
- ``combine`` takes one row [K] in bfloat16 for each token that arrived, and returns the sum over ranks at the token's
  origin.
- Experts are numbered rank by rank, equally many on each: here by the slots of a placement.
- Both take ``async_with_compute_stream`` and return an event that the current stream waits for.
- The host reads the number of tokens that arrive, so calls cannot be captured.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_core._support.async_result import AsyncResult
from moe_core.errors import ConfigError, TensorError
from moe_core.interface.prepare_finalize_claims import PrepareFinalizeClaims
from moe_core.parallel.prepare_finalize.collective import CollectivePrepareAndFinalize
from moe_core.parallel.prepare_finalize.token_rows import Tokens
from moe_core.spec.config import FusedMoEConfig, TokenSharing
from moe_core.spec.device import DeviceInfo, cuda
from moe_core.spec.environment import Requirement
from moe_core.spec.numerics import FP8_E4M3
from moe_core.spec.quant_key import QuantKey

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from moe_core.interface.experts import FusedMoEExperts

DEEP_EP = Requirement("deep_ep", "deep_ep", "2.0", "deep_ep @ git+https://github.com/deepseek-ai/DeepEP")


@dataclass(frozen=True, eq=False)
class _Handle:
    """DeepEP's dispatch handle (None on meta tensors), and this rank's number of tokens."""

    deepep: Any
    count: int


class DeepEPPrepareAndFinalize(CollectivePrepareAndFinalize):
    """Dispatch and combine by DeepEP; sums over ranks are in bfloat16.

    Layers with the same ranks, sizes and ``max_num_tokens`` share a buffer.
    """

    name = "deepep"
    lora = False
    claims = PrepareFinalizeClaims(
        frozenset({TokenSharing.EP_RANK, TokenSharing.NONE}),
        devices=(cuda(min=90, max=109),),
        dtypes=frozenset({torch.bfloat16}),
        quantizes=True,
        cuda_graph=False,
        bounded=True,
        hidden_multiple=16,
        max_top_k=32,
        requires=(DEEP_EP,),
        notes="written after the library's documentation and tested with a double of it; not run on hardware",
    )

    @classmethod
    def extra_reasons(
        cls, config: FusedMoEConfig, experts: type[FusedMoEExperts] | None, device: DeviceInfo
    ) -> list[str]:
        parallel = config.parallel
        if parallel.tp_size > 1 and parallel.dp_size == parallel.world_size:
            return [
                "sends a token to one rank of an expert: tensor-parallel ranks must share theirs (dp_size = ep_size)"
            ]
        return []

    def travels_quantized(self, key: QuantKey) -> bool:
        """Whether DeepEP can dispatch this quantization: e4m3 codes with float32 scales.

        Other keys are quantized on arrival.

        Args:
            key: Quantization of activations.

        Returns:
            True if tokens are quantized before dispatch.
        """
        return key.is_token_wise and key.dtype == FP8_E4M3 and key.scale.dtype is torch.float32

    def chosen_from(self, rows: int, handle: object = None) -> int:
        return self.every_token(rows)

    def dispatch(
        self, tokens: Tokens, tokens_per_rank: Sequence[int] | None, quantize_as: QuantKey | None, *, gaps: bool
    ) -> AsyncResult[tuple[Tokens, object]]:
        self.check_own(len(tokens.experts), tokens_per_rank)
        tokens = tokens.quantized(quantize_as)
        device = tokens.experts.device
        count = len(tokens.experts)
        if device.type == "meta":
            came = replace(tokens, experts=tokens.experts.int())
            return AsyncResult.done((came.unpack(came.pack()), _Handle(None, count)))
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"all2all_backend {self.name!r} cannot be captured in a CUDA graph, since the host needs the "
                "token counts; use 'allgather_reducescatter' or 'low_latency' for calls in graphs"
            )
        most = self.config.max_num_tokens or 0
        if count > most:
            raise TensorError(
                f"hidden_states has {count} tokens, expected at most max_num_tokens = {most} of the config"
            )
        tables = self.destinations.tables(device)
        ranks, local = self.destinations.choose(tokens.experts)
        slots = torch.where(ranks < 0, -1, ranks * tables.stride + local)
        buffer = self._buffer(tokens.hidden_states.shape[1], slots.shape[1])
        what = "tokens are sent to the ranks of their experts (DeepEP)"
        with self.exchange.communicating(what):
            given = dispatch_arguments(
                replace(tokens, experts=slots), self.ranks.parallel.ep_size * tables.stride, most
            )
            found, ids, weights, handle, event = buffer.dispatch(**given)
        hidden, scale = found if isinstance(found, tuple) else (found, None)

        def finish() -> tuple[Tokens, object]:
            with self.exchange.communicating(what):
                event.current_stream_wait()
            return Tokens(hidden, scale, weights, ids), _Handle(handle, count)

        return AsyncResult(finish)

    def combine(self, output: Tensor, partial: Tensor, handle: object) -> AsyncResult[None]:
        if not isinstance(handle, _Handle):
            raise TypeError(f"combine got {handle!r}, expected what dispatch returned")
        if partial.is_meta:
            return AsyncResult.done(None)
        what = "results are sent back and added up (DeepEP)"
        buffer = self._buffer(output.shape[1], self.config.top_k)
        with self.exchange.communicating(what):
            summed, _, event = buffer.combine(
                x=partial.contiguous(), handle=handle.deepep, async_with_compute_stream=True
            )

        def finish() -> None:
            with self.exchange.communicating(what):
                event.current_stream_wait()
            output.copy_(summed[: handle.count])

        return AsyncResult(finish)

    def _buffer(self, hidden: int, top_k: int) -> Any:
        """The buffer of layers with these sizes; all ranks create it together in the first call."""
        seconds = max(int(self.ranks.timeout.total_seconds()), 1)
        return _buffer_of(self.exchange.group, self.config.max_num_tokens or 0, hidden, top_k, seconds)


def dispatch_arguments(tokens: Tokens, num_experts: int, max_tokens: int) -> dict[str, Any]:
    """Build the keyword arguments of ``ElasticBuffer.dispatch``.

    Args:
        tokens: Tokens whose ``experts`` are slots, numbered rank by rank, -1 for none.
        num_experts: Number of slots.
        max_tokens: Largest number of tokens per rank.

    Returns:
        The keyword arguments.
    """
    hidden, scale = tokens.hidden_states.contiguous(), tokens.scale
    ids, weights = tokens.experts.long(), tokens.weights
    if not len(ids):
        # Add a token without experts, because kernels are launched for at least one token.
        hidden = hidden.new_zeros(1, hidden.shape[1])
        scale = None if scale is None else scale.new_zeros(1, scale.shape[1])
        ids, weights = ids.new_full((1, ids.shape[1]), -1), weights.new_zeros(1, weights.shape[1])
    return {
        "x": hidden if scale is None else (hidden, scale.contiguous()),
        "topk_idx": ids.contiguous(),
        "topk_weights": weights.contiguous(),
        "num_experts": num_experts,
        "num_max_tokens_per_rank": max(max_tokens, 1),
        "async_with_compute_stream": True,
        "do_cpu_sync": True,
    }


@functools.cache
def _buffer_of(group: ProcessGroup, max_tokens: int, hidden: int, top_k: int, seconds: int) -> Any:
    return DEEP_EP.load().ElasticBuffer(
        group,
        num_max_tokens_per_rank=max(max_tokens, 1),
        hidden=hidden,
        num_topk=top_k,
        num_cpu_timeout_secs=seconds,
        num_gpu_timeout_secs=seconds,
    )
