"""What a layer's calls launch, for all numbers of tokens up to a largest one, without making a call.

The launches of a call with M tokens follow from the layer and from M.  They are recorded on meta tensors, so that
nothing runs and no memory is taken.  Which M differ is found, not listed:

- where :meth:`FusedMoEExperts.launch_choice` changes, a pure function of M that is asked for every one
- else M decides by thresholds alone (number of programs, one launch or two): two numbers of tokens between which the
  choice stays, and whose launches are compiled alike, have none that differ between them; others are bisected
- Triton compiles for integers that are 1, for multiples of 16 and for others; an integer that is some c * M is one of
  these by the largest power of two up to 16 that divides M, so numbers that differ in it are looked at separately
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from moe_core.interface.experts import FusedMoEExperts, FusedMoEExpertsModular
from moe_core.interface.prepare_finalize import FusedMoEPrepareAndFinalizeModular, TokenRouting
from moe_core.kernels.launch.launch import Launch, record
from moe_core.kernels.ops.routing import fused_route
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.routing import RoutingConfig
from moe_core.spec.weights import KernelWeights
from moe_core.spec.workspace import Workspace

#: a number of tokens to what the launches of its call are compiled for
Kinds = Callable[[int], frozenset[Hashable]]


class Kernel(Protocol):
    """What is used here of a `moe_core.runtime.kernel.FusedMoEKernel`, which warms itself up and so stands above."""

    @property
    def config(self) -> FusedMoEConfig: ...

    @property
    def experts(self) -> FusedMoEExperts: ...

    @property
    def weights(self) -> KernelWeights: ...

    @property
    def lora(self) -> object | None: ...

    @property
    def prepare_finalize(self) -> FusedMoEPrepareAndFinalizeModular | None: ...

    @property
    def run_parts(self) -> Callable[..., None]: ...


class Layer(Protocol):
    """What is used here of a `moe_core.layer.layer.FusedMoELayer`."""

    @property
    def config(self) -> FusedMoEConfig: ...

    @property
    def routing(self) -> RoutingConfig | None: ...

    @property
    def correction_bias(self) -> Tensor | None: ...

    @property
    def expert_map(self) -> Tensor | None: ...


def records_launches(kernel: Kernel) -> bool:
    """Whether the calls of ``kernel`` can be recorded."""
    experts = kernel.experts
    return isinstance(experts, FusedMoEExpertsModular) and experts.launches_only


def launches_up_to(kernel: Kernel, most: int, *, mapped: bool = False) -> list[Launch]:
    """Launches of calls with 1 to ``most`` tokens, one or more of each kind that is compiled by itself.

    With expert ids of 32 and of 64 bits, and, where the layer has places for them, with and without adapters.
    ``mapped``: calls bring an expert map; they always do where experts live elsewhere.
    """
    movement = kernel.prepare_finalize
    if movement is not None and kernel.config.max_num_tokens is not None:
        most = min(most, kernel.config.max_num_tokens)

    # on meta tensors tokens arrive as they left, and as many as all ranks bring may arrive
    arriving = movement is not None and movement.collective and not movement.empty_rows
    if movement is not None and arriving:
        most = movement.max_tokens(most)

    def choice(tokens: int) -> Hashable:
        if movement is not None:
            tokens = movement.chosen_from(tokens) if arriving else movement.max_tokens(tokens)
        return kernel.experts.launch_choice(tokens)

    recorded: list[Launch] = []
    for _ in (None,) if movement is None else movement.arrivals():
        found: dict[int, list[Launch]] = {}

        def kinds(tokens: int, found: dict[int, list[Launch]] = found) -> frozenset[Hashable]:
            if tokens not in found:
                found[tokens] = list(call_launches(kernel, tokens, mapped=mapped))
            return frozenset(one.compiled_for() for one in found[tokens])

        for tokens in representatives(most, choice, kinds):
            kinds(tokens)
        recorded += [one for launches in found.values() for one in launches]
    return recorded


def routing_launches(layer: Layer, most: int) -> list[Launch]:
    """Launches by which ``layer`` routes 1 to ``most`` tokens, from logits in float32 and in its own dtype."""
    config, found = layer.config, []
    bias = None if layer.correction_bias is None else _meta(config.num_experts, dtype=layer.correction_bias.dtype)
    routing = layer.routing
    if routing is None or routing.custom is not None:
        return []
    for dtype in dict.fromkeys((torch.float32, config.dtype)):

        def launches(tokens: int, dtype: torch.dtype = dtype) -> list[Launch]:
            logits = _meta(tokens, config.num_experts, dtype=dtype)
            with record() as recorded:
                fused_route(logits, top_k=config.top_k, config=routing, correction_bias=bias)
            return recorded

        def kinds(tokens: int, launches: Callable[[int], list[Launch]] = launches) -> frozenset[Hashable]:
            return frozenset(one.compiled_for() for one in launches(tokens))

        found += [one for tokens in representatives(most, lambda _: None, kinds) for one in launches(tokens)]
    return found


def representatives(most: int, choice: Callable[[int], Hashable], kinds: Kinds) -> list[int]:
    """Numbers of tokens from 1 to ``most`` whose calls' ``kinds`` are those of all; see the module."""
    chosen: set[int] = set()
    for _, run in groupby(range(1, most + 1), choice):
        members = list(run)
        first, last = members[0], members[-1]
        for power in (1, 2, 4, 8, 16):
            step = min(2 * power, 16)
            start = first + (power % step - first) % step
            # one token is like no other: everything that is c * M may be 1
            if start == 1:
                chosen.add(1)
                start += step
            chosen.update(_bisected(range(start, last + 1, step), kinds))
    return sorted(chosen)


def _bisected(members: Sequence[int], kinds: Kinds) -> Iterator[int]:
    if not members:
        return
    yield members[0]
    yield members[-1]
    middle = len(members) // 2
    if len(members) > 2 and kinds(members[0]) != kinds(members[-1]):
        yield from _bisected(members[: middle + 1], kinds)
        yield from _bisected(members[middle:], kinds)


def call_launches(kernel: Kernel, tokens: int, *, mapped: bool = False) -> Iterator[Launch]:
    """Launches of the calls with ``tokens`` tokens that `launches_up_to` describes; nothing runs."""
    config = kernel.config
    mapped = mapped or config.local_experts < config.num_experts
    for ids in (torch.int32, torch.int64):
        x = _meta(tokens, config.hidden_size, dtype=config.dtype)
        routing = TokenRouting(
            _meta(tokens, config.top_k, dtype=torch.float32),
            _meta(tokens, config.top_k, dtype=ids),
            _meta(config.num_experts, dtype=torch.int32) if mapped else None,
        )
        adapters = _meta(tokens, dtype=torch.int32)
        for adapter_ids in (None,) if kernel.lora is None else (None, adapters):
            with record() as launches:
                called = replace(routing, adapter_ids=adapter_ids)
                kernel.run_parts(Workspace("meta"), torch.empty_like(x), x, called)
            yield from launches


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
