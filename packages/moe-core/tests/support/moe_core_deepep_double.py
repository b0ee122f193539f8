"""A double of DeepEP's ``ElasticBuffer``: what its documentation says of dispatch and combine, on torch.distributed."""

from __future__ import annotations

import types
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from moe_core import any_device
from moe_core.parallel.prepare_finalize.deepep import DeepEPPrepareAndFinalize
from moe_core_rank_layers import Case, run_cases
from torch import Tensor


class Event:
    """Nothing to wait for: calls on a CPU have ended when they return."""

    waited = 0

    def current_stream_wait(self, release_handle: bool = False) -> None:
        Event.waited += 1


@dataclass
class Handle:
    """Which token of which rank each received row is."""

    rank: Tensor
    token: Tensor
    count: int


class ElasticBuffer:
    """Signatures as of ``deep_ep`` 2.1, of what is used of them."""

    made = 0

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        ElasticBuffer.made += 1
        self.group, self.most, self.hidden, self.top_k = group, num_max_tokens_per_rank, hidden, num_topk

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        num_max_tokens_per_rank: int,
        async_with_compute_stream: bool,
        do_cpu_sync: bool,
    ) -> tuple[Any, Tensor, Tensor, Handle, Event]:
        values, scale = x if isinstance(x, tuple) else (x, None)
        size, me = dist.get_world_size(self.group), dist.get_rank(self.group)
        count, each = len(values), num_experts // size
        assert num_experts % size == 0
        assert 1 <= count <= num_max_tokens_per_rank == self.most
        assert (values.shape[1], topk_idx.shape[1]) == (self.hidden, self.top_k)
        assert topk_idx.dtype == torch.int64
        assert topk_weights.dtype == torch.float32
        assert int(topk_idx.max()) < num_experts
        assert scale is None or (values.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
        tensors = [tensor for tensor in (values, scale, topk_idx, topk_weights) if tensor is not None]
        assert all(tensor.is_contiguous() and len(tensor) == count for tensor in tensors)
        for row in topk_idx.tolist():
            chosen = [expert for expert in row if expert >= 0]
            assert len(set(chosen)) == len(chosen)
        everyone: list[Any] = [None] * size
        # pickles of 8-bit floats are not read back
        raw = [tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor for tensor in tensors]
        dist.all_gather_object(everyone, raw, self.group)
        rows: list[list[Tensor]] = []
        ranks, tokens = [], []
        for rank, theirs in enumerate(everyone):
            *moved, ids, weights = theirs
            here = (ids >= me * each) & (ids < (me + 1) * each)
            which = here.any(1).nonzero().flatten()
            rows.append([*(part[which] for part in moved), (ids - me * each).where(here, -1)[which], weights[which]])
            ranks += [rank] * len(which)
            tokens += which.tolist()
        found = [torch.cat(parts) for parts in zip(*rows, strict=True)]
        handle = Handle(torch.tensor(ranks, dtype=torch.int64), torch.tensor(tokens, dtype=torch.int64), count)
        hidden = found[0].view(values.dtype)
        received = hidden if scale is None else (hidden, found[1])
        return received, found[-2], found[-1], handle, Event()

    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None, async_with_compute_stream: bool = False
    ) -> tuple[Tensor, None, Event]:
        assert x.is_contiguous()
        assert x.shape == (len(handle.rank), self.hidden)
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, (x, handle), self.group)
        total = x.new_zeros(handle.count, self.hidden)
        for rows, theirs in everyone:
            mine = theirs.rank == dist.get_rank(self.group)
            total.index_add_(0, theirs.token[mine], rows[mine])
        return total, None, Event()


def deepep_cases(rank: int, cases: list[Case]) -> tuple[list[str], int, int]:
    """What is wrong with this rank's outputs, how many buffers were made, and how often events were waited for."""
    import sys

    library: Any = types.ModuleType("deep_ep")
    library.ElasticBuffer = ElasticBuffer
    library.__spec__ = types.SimpleNamespace(submodule_search_locations=None)
    sys.modules["deep_ep"] = library
    claims = DeepEPPrepareAndFinalize.claims
    DeepEPPrepareAndFinalize.claims = replace(
        claims, devices=(any_device(),), dtypes=frozenset({torch.float32}), requires=()
    )
    return run_cases(rank, cases), ElasticBuffer.made, Event.waited
