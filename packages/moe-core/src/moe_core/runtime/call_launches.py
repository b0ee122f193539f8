"""Record the kernel launches of a layer's calls for a range of token counts, without a call.

The launches of a call with M tokens follow from the layer and from M. They are recorded on meta tensors, so nothing
runs and no memory is allocated. The set of M whose launches differ is searched, not listed:

- :meth:`RecordableExperts.launch_variant`, a pure function of M, is evaluated for every M; launches may differ where it
  changes.
- Within a run of equal choices, M matters only through thresholds (grid size, one launch or two). If two token counts
  with the same choice compile alike, so do all counts between them; otherwise the range is bisected.
- Triton specializes integers equal to 1, multiples of 16, and others. Which of these an integer c * M is depends on the
  largest power of two, up to 16, that divides M. Token counts that differ in it are therefore searched separately.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from moe_core.interface.prepare_finalize import TokenRouting
from moe_core.interface.recordable import RecordableExperts
from moe_core.kernels.launch.launch import Launch, record
from moe_core.kernels.ops.routing import fused_route
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.routing import RoutingConfig
from moe_core.spec.workspace import Workspace

if TYPE_CHECKING:
    from moe_core.runtime.kernel import FusedMoEKernel

#: Maps a number of tokens to the specializations that the launches of its call compile.
Kinds = Callable[[int], frozenset[Hashable]]


class Layer(Protocol):
    """The part of `moe_core.layer.layer.FusedMoELayer` used here."""

    @property
    def config(self) -> FusedMoEConfig: ...

    @property
    def routing(self) -> RoutingConfig | None: ...

    @property
    def correction_bias(self) -> Tensor | None: ...

    @property
    def expert_map(self) -> Tensor | None: ...


def launches_up_to(kernel: FusedMoEKernel, most: int, *, mapped: bool = False) -> list[Launch]:
    """Record the launches of calls with 1 to ``most`` tokens, at least one per compiled kernel.

    Covers 32- and 64-bit expert ids and, if the layer has LoRA slots, calls with and without adapters.

    Args:
        kernel: Kernel of a layer.
        most: Largest number of tokens of a call on this rank.
        mapped: Whether calls pass an expert map; they always do if other ranks hold experts.

    Returns:
        The launches; none if the experts are not recordable.
    """
    experts, movement = kernel.experts, kernel.prepare_finalize
    if not isinstance(experts, RecordableExperts):
        return []
    if movement is not None and kernel.config.max_num_tokens is not None:
        most = min(most, kernel.config.max_num_tokens)

    # On meta tensors tokens arrive as they were sent; up to the tokens of all ranks may arrive.
    arriving = movement is not None and movement.collective and not movement.empty_rows
    if movement is not None and arriving:
        most = movement.max_tokens(most)

    def choice(tokens: int) -> Hashable:
        if movement is not None:
            tokens = movement.chosen_from(tokens) if arriving else movement.max_tokens(tokens)
        return experts.launch_variant(tokens)

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
    """Record the launches that route 1 to ``most`` tokens.

    Args:
        layer: Layer with the routing.
        most: Largest number of tokens.

    Returns:
        Launches for logits in float32 and in the layer's dtype; empty for custom routing.
    """
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
    """Choose token counts whose launches cover those of all counts; see the module docstring.

    Args:
        most: Largest number of tokens.
        choice: Launch choice for a number of tokens.
        kinds: Specializations for a number of tokens.

    Returns:
        Sorted numbers of tokens, from 1 to ``most``.
    """
    chosen: set[int] = set()
    for _, run in groupby(range(1, most + 1), choice):
        members = list(run)
        first, last = members[0], members[-1]
        for power in (1, 2, 4, 8, 16):
            step = min(2 * power, 16)
            start = first + (power % step - first) % step
            # One token is a special case: every c * M may be 1.
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


def call_launches(kernel: FusedMoEKernel, tokens: int, *, mapped: bool = False) -> Iterator[Launch]:
    """Record the launches of the calls with one number of tokens; nothing runs.

    Args:
        kernel: Kernel of a layer.
        tokens: Number of tokens.
        mapped: Whether calls pass an expert map.

    Returns:
        Iterator over the launches, for the variants described in `launches_up_to`.
    """
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
