"""Compare once, at construction, what ranks must agree on.

Otherwise a difference would cause a wrong result or a hang later. Each rank states facts as strings. A fact is compared
among the ranks that state it.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core.errors import ConfigError
from moe_core.parallel.distributed.communication import Communicator
from moe_core.spec.environment import distribution_version
from moe_core.spec.quant_key import key_name

if TYPE_CHECKING:
    from moe_core.interface.experts import FusedMoEExperts
    from moe_core.parallel.placement.placement import ExpertPlacement

#: Longest value, in characters, that an error shows.
_LONGEST = 200
#: Config fields that differ between ranks.
_OF_A_RANK = ("parallel", "num_local_experts", "intermediate_size")


def check_agreement(ranks: Communicator, facts: Mapping[str, str]) -> None:
    """Compare facts among ranks; all ranks call this together.

    Ranks are named by their position in the group.

    Args:
        ranks: The ranks.
        facts: Values of this rank, by name.

    Raises:
        ConfigError: Facts differ. Raised on every rank, with the numbers of the ranks, the values of the first
            differing fact, and the names of the others.
        CommunicationError: A rank did not call.
    """
    stated: list[dict[str, str]] = [
        json.loads(text) for text in exchange(ranks, json.dumps(dict(facts)), "ranks compare their layers")
    ]
    differing = []
    for name in dict.fromkeys(name for each in stated for name in each):
        values: dict[str, list[int]] = {}
        for rank, each in enumerate(stated):
            if name in each:
                values.setdefault(each[name], []).append(rank)
        if len(values) > 1:
            differing.append((name, values))
    if not differing:
        return
    name, values = differing[0]
    found = "; ".join(
        f"{_shown(value)} on rank{'s' if len(which) > 1 else ''} {', '.join(map(str, which))}"
        for value, which in values.items()
    )
    others = f" (and in {', '.join(other for other, _ in differing[1:])})" if differing[1:] else ""
    raise ConfigError(
        f"the layer's ranks differ in {name}{others}: {found}; all ranks must make the same layer",
        details="\n".join(f"{name}: {values}" for name, values in differing),
    )


#: Number of layers whose facts the ranks of a group have compared.
_COMPARED: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def check_layers(
    ranks: Communicator,
    experts: FusedMoEExperts,
    placement: ExpertPlacement | None,
    *,
    prepare_finalize: str = "",
    layer: str = "",
) -> int:
    """Compare the facts of a layer among its ranks.

    This is :func:`check_agreement` of :func:`layer_facts`.

    Args:
        ranks: The ranks.
        experts: This rank's experts.
        placement: Placement used by dispatch, if any.
        prepare_finalize: Name of the prepare/finalize, if the caller passed one.
        layer: Name of the layer in its checkpoint.

    Returns:
        Number of the layer among those that these ranks have compared, the same on all ranks.

    Raises:
        ConfigError: As in :func:`check_agreement`.
        CommunicationError: As in :func:`check_agreement`.
    """
    check_agreement(ranks, layer_facts(experts, placement, prepare_finalize=prepare_finalize, layer=layer))
    number = _COMPARED[ranks.group] = _COMPARED.get(ranks.group, 0) + 1
    return number


def layer_facts(
    experts: FusedMoEExperts, placement: ExpertPlacement | None, *, prepare_finalize: str = "", layer: str = ""
) -> dict[str, str]:
    """Return the facts that the ranks of a layer must agree on.

    Args:
        experts: This rank's experts.
        placement: Placement used by dispatch, if any.
        prepare_finalize: Name of the prepare/finalize, if the caller passed one.
        layer: Name of the layer in its checkpoint.

    Returns:
        Values by name.
    """
    config = experts.config
    parallel = config.parallel
    facts = {
        "the layer's name": layer,
        "the version of moe-core": str(distribution_version("moe-core")),
        "tp_size": str(parallel.tp_size),
        "ep_size": str(parallel.ep_size),
        "dp_size": str(parallel.dp_size),
        "all2all_backend": parallel.all2all_backend,
        "prepare/finalize": prepare_finalize,
        "the quantization of weights": key_name(experts.weight_key),
        "the quantization of activations": key_name(experts.activation_key),
        # Ranks with the same tp_rank hold the same columns of their experts.
        f"intermediate_size of tp_rank {parallel.tp_rank}": str(config.intermediate_size),
        "the form in which tokens travel": key_name(experts.activation_key if experts.takes_quantized else None),
        "the placement of experts": "none" if placement is None else str([list(held) for held in placement.ranks]),
    }
    # The text of a custom routing function contains its address, which carries no information.
    skipped = {*_OF_A_RANK, *(("routing",) if config.routing is not None and config.routing.custom else ())}
    return facts | {
        field.name: str(getattr(config, field.name)) for field in fields(config) if field.name not in skipped
    }


def exchange(ranks: Communicator, text: str, what: str) -> list[str]:
    """All-gather a string among ranks.

    Args:
        ranks: The ranks.
        text: String of this rank.
        what: Clause of error messages, such as "experts are moved".

    Returns:
        The string of every rank, in their order.

    Raises:
        CommunicationError: A rank did not call.
    """
    size, device = ranks.size, ranks.device
    content = text.encode()
    lengths = torch.empty(size, dtype=torch.int64, device=device)
    ranks.begin(what, dist.all_gather_into_tensor, lengths, lengths.new_full((1,), len(content))).wait()
    sizes = ranks.numbers(lengths, what)
    mine = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    gathered = torch.empty(size * max(sizes), dtype=torch.uint8, device=device)
    ranks.begin(what, dist.all_gather_into_tensor, gathered, mine.to(device)).wait()
    if gathered.is_cuda:
        ranks.synchronize(what)
    rows: Tensor = gathered.cpu().view(size, -1)
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, sizes, strict=True)]


def _shown(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
