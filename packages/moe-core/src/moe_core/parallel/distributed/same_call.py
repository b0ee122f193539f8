"""Cheap per-call comparison among ranks: which layer is called, and with how many tokens."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_core.errors import CommunicationError, TensorError
from moe_core.parallel.distributed.host_numbers import tell
from moe_core.spec.environment import checks_values

if TYPE_CHECKING:
    from moe_core.parallel.distributed.communication import Communicator


def compare_calls(
    ranks: Communicator,
    layer: int,
    tokens: int,
    given: Sequence[int] | None,
    what: str,
    numbers: Sequence[int] = (),
) -> tuple[list[int], list[list[int]]]:
    """Compare which layer ranks call, and exchange token counts and further numbers in the same message.

    Args:
        ranks: All of them call this together.
        layer: Number of the layer.
        tokens: Number of tokens that this rank brings.
        given: The caller's ``tokens_per_rank``, if any.
        what: Clause of error messages, such as "experts are moved".
        numbers: Numbers to exchange: equally many on each rank, at most one per rank.

    Returns:
        The number of tokens that each rank brings, and the numbers of each rank, padded with zeros.

    Raises:
        CommunicationError: Ranks are in calls of different layers (raised on every rank), or a rank did not call.
        TensorError: ``tokens_per_rank`` of a rank is wrong; raised on every rank.
    """
    digest = 0 if given is None else _digest(given)
    rows = tell(ranks, [layer, tokens, digest, *numbers], what)
    layers, counts, digests = [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]
    if layers.count(layer) != len(layers):
        raise CommunicationError(
            f"{what}, but they are in calls of different layers (in order of creation: "
            f"{_each(ranks, layers)}): all ranks must make the same calls in the same order; after an error "
            "on one rank, recreate groups and layers on all ranks"
        )
    if any(digests):
        right = {0, _digest(counts)}
        wrong = [rank for rank, found in zip(ranks.members, digests, strict=True) if found not in right]
        if wrong:
            here = f"is {list(given)} on this rank, and" if given is not None and digest not in right else "is"
            raise TensorError(
                f"tokens_per_rank {here} wrong on rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}, "
                f"expected {counts}: the number of tokens that each rank brings to this call"
            )
    return counts, [row[3:] for row in rows]


def compare_same_tokens(ranks: Communicator, layer: int, tokens: Tensor) -> None:
    """Check that ranks which should have the same tokens have equally many, before a sum.

    The comparison is made if the tokens are on the CPU, or if calls are checked (``MOE_CHECK=1``).

    Args:
        ranks: Ranks whose results are summed.
        layer: Number of the layer.
        tokens: Hidden states ``[M, K]``.

    Raises:
        TensorError: Ranks have different numbers of tokens; raised on every rank.
        CommunicationError: As in :func:`compare_calls`.
    """
    if hosts_are_silent(tokens.device) or not (checks_values() or not ranks.on_gpus):
        return
    found, _ = compare_calls(ranks, layer, len(tokens), None, "ranks tell how many tokens they have")
    if len(set(found)) > 1:
        raise TensorError(
            f"hidden_states has different numbers of tokens ({_each(ranks, found)}), expected the same tokens "
            f"on ranks {ranks.members}, whose partial sums are added"
        )


def hosts_are_silent(device: torch.device) -> bool:
    """Whether a call on a device is recorded or captured, so that replays run no host code.

    Args:
        device: Device of the call.

    Returns:
        True on the meta device and during CUDA graph capture.
    """
    return device.type == "meta" or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _each(ranks: Communicator, numbers: Sequence[int]) -> str:
    return ", ".join(f"{number} on rank {rank}" for rank, number in zip(ranks.members, numbers, strict=True))


def _digest(counts: Sequence[int]) -> int:
    """32-bit checksum of ``counts``, never 0."""
    return zlib.crc32(repr([int(count) for count in counts]).encode()) or 1
