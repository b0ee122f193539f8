"""The placement of a layer's experts on expert-parallel ranks, with replicas, as a value.

An expert of the model is a *logical* expert. Each *slot* of a rank that holds one is a physical expert.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_core._support.atomic_write import as_path, write_whole
from moe_core.errors import ConfigError, check_instance
from moe_core.spec.config import whole_number

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Version of the JSON form.
VERSION = 1

#: Index of a layer in its only accepted spelling.
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


@dataclass(frozen=True)
class ExpertPlacement:
    """The experts of each expert-parallel rank, by local index.

    Every expert is on some rank. An expert on several ranks is *replicated*: each of its tokens goes to one of the
    replicas. No rank holds an expert twice. Placements are hashable and compare by value; the ``repr`` evaluates back.

    Attributes:
        num_experts: Number of experts E of the layer.
        ranks: Global ids; ``ranks[r][i]`` is expert ``i`` of rank ``r``. Ranks may hold different numbers of experts.

    Raises:
        ConfigError: The placement violates these rules.
    """

    num_experts: int
    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        count = whole_number("num_experts", self.num_experts)
        try:
            ranks = tuple(tuple(_expert(expert) for expert in rank) for rank in self.ranks)
        except TypeError:
            raise ConfigError(f"ranks is {self.ranks!r}, expected a sequence of expert ids for each rank") from None
        object.__setattr__(self, "num_experts", count)
        object.__setattr__(self, "ranks", ranks)
        if not ranks:
            raise ConfigError("ranks is empty, expected at least one")
        for rank, held in enumerate(ranks):
            wrong = [expert for expert in held if not 0 <= expert < count]
            if wrong:
                raise ConfigError(f"rank {rank} holds expert {wrong[0]}, expected ids within 0..{count - 1}")
            if not held:
                raise ConfigError(f"rank {rank} holds no expert: use fewer ranks, or replicate experts on it")
            if len(set(held)) < len(held):
                twice = next(expert for expert in held if held.count(expert) > 1)
                raise ConfigError(f"rank {rank} holds expert {twice} twice: replicas belong on different ranks")
        found = set(itertools.chain.from_iterable(ranks))
        missing = count - len(found)
        if missing:
            first = next(expert for expert in range(count) if expert not in found)
            more = f" and {missing - 1} more" if missing > 1 else ""
            raise ConfigError(f"no rank holds expert {first}{more}: every expert must be on some rank")

    @staticmethod
    def contiguous(num_experts: int, ep_size: int) -> ExpertPlacement:
        """Place consecutive experts on each rank; the first ranks get one more if E does not divide.

        Args:
            num_experts: Number of experts.
            ep_size: Number of expert-parallel ranks.

        Returns:
            The placement.

        Raises:
            ConfigError: There are fewer experts than ranks.
        """
        _check_ranks(num_experts, ep_size)
        each, more = divmod(num_experts, ep_size)
        ends = [0, *itertools.accumulate(each + (rank < more) for rank in range(ep_size))]
        return ExpertPlacement(num_experts, tuple(tuple(range(*pair)) for pair in itertools.pairwise(ends)))

    @staticmethod
    def round_robin(num_experts: int, ep_size: int) -> ExpertPlacement:
        """Place expert ``e`` on rank ``e % ep_size``.

        Args:
            num_experts: Number of experts.
            ep_size: Number of expert-parallel ranks.

        Returns:
            The placement.

        Raises:
            ConfigError: There are fewer experts than ranks.
        """
        _check_ranks(num_experts, ep_size)
        return ExpertPlacement(num_experts, tuple(tuple(range(rank, num_experts, ep_size)) for rank in range(ep_size)))

    @property
    def ep_size(self) -> int:
        """Number of expert-parallel ranks."""
        return len(self.ranks)

    @functools.cached_property
    def replicas(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(rank, local index) of each replica of each expert, ranks ascending."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.num_experts)]
        for rank, held in enumerate(self.ranks):
            for local, expert in enumerate(held):
                found[expert].append((rank, local))
        return tuple(map(tuple, found))

    @property
    def max_replicas(self) -> int:
        """Largest number of replicas of an expert."""
        return max(map(len, self.replicas))

    @property
    def max_local_experts(self) -> int:
        """Largest number of experts on a rank."""
        return max(map(len, self.ranks))

    @property
    def has_replicas(self) -> bool:
        """Whether some expert is on several ranks.

        If so, a rank that sees all tokens must skip those that another replica takes: use
        :meth:`moe_core.parallel.placement.tables.ReplicaTables.local_ids`, not an expert map.
        """
        return self.max_replicas > 1

    def expert_map(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Build the expert map of a rank.

        Args:
            rank: The rank.
            device: Device of the map.

        Returns:
            Local index of each expert on ``rank``, int32 ``[E]``; -1 for experts that it does not hold.

        Raises:
            ConfigError: The rank does not exist.
        """
        from moe_core.parallel.shard import map_of

        check_instance("rank", rank, int)
        if not 0 <= rank < self.ep_size:
            raise ConfigError(f"rank {rank} is not a rank of a placement on {self.ep_size}")
        return map_of(self.ranks[rank], self.num_experts, device)

    def aligned(self, current: ExpertPlacement) -> ExpertPlacement:
        """Reorder experts within ranks so that those already there keep their local index.

        Args:
            current: Placement whose local indices are kept.

        Returns:
            A placement with the same experts on each rank.

        Raises:
            ConfigError: The number of ranks, or of experts on a rank, differs.
        """
        check_instance("current", current, ExpertPlacement)
        sizes = [tuple(map(len, placement.ranks)) for placement in (self, current)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"the ranks hold {_short(sizes[0])} experts, those of the other placement {_short(sizes[1])}"
            )
        ranks = []
        for held, here in zip(self.ranks, current.ranks, strict=True):
            new = iter([expert for expert in held if expert not in here])
            ranks.append(tuple(expert if expert in held else next(new) for expert in here))
        return ExpertPlacement(self.num_experts, tuple(ranks))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict: ``{"num_experts": 4, "ranks": [[0, 1], [2, 3]]}``."""
        return {"num_experts": self.num_experts, "ranks": [list(held) for held in self.ranks]}

    @staticmethod
    def from_json(value: object) -> ExpertPlacement:
        """Read the result of :meth:`to_json`.

        Args:
            value: Parsed JSON.

        Returns:
            The placement.

        Raises:
            ConfigError: The value is not a valid placement.
        """
        if (
            not isinstance(value, dict)
            or set(value) != {"num_experts", "ranks"}
            or not isinstance(value["ranks"], list)
        ):
            raise ConfigError(f"{_short(value)} is not a valid placement, expected {{num_experts, ranks: [[ids], …]}}")
        return ExpertPlacement(value["num_experts"], tuple(value["ranks"]))


def save_placements(path: str | os.PathLike[str], placements: Mapping[int, ExpertPlacement]) -> None:
    """Write the placements of a model's layers to a JSON file, atomically.

    Args:
        path: File to write.
        placements: Placement by index of the layer.

    Raises:
        ConfigError: An argument is invalid, or the file cannot be written.
    """
    file = as_path("path", path)
    if not isinstance(placements, Mapping):
        raise ConfigError(f"placements is {_short(placements)}, expected a mapping of layers to placements")
    layers = {whole_number("the index of a layer", layer, 0): placement for layer, placement in placements.items()}
    for layer, placement in layers.items():
        if not isinstance(placement, ExpertPlacement):
            raise ConfigError(f"layer {layer} has the placement {_short(placement)}, expected an ExpertPlacement")
    content = {"version": VERSION, "layers": {str(layer): layers[layer].to_json() for layer in sorted(layers)}}
    write_whole(file, json.dumps(content).encode())


def load_placements(path: str | os.PathLike[str]) -> dict[int, ExpertPlacement]:
    """Read the placements that :func:`save_placements` wrote.

    Args:
        path: File to read.

    Returns:
        Placement by index of the layer.

    Raises:
        ConfigError: The file is not valid; the message names it.
    """
    # Imported here because reading checkpoint files needs more modules than a placement does.
    from moe_core._support.strict_json import load_settings

    content = load_settings("path", path)
    if not isinstance(content.get("layers"), dict):
        raise ConfigError(f"{path} has no placements, expected an object with version and layers")
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        raise ConfigError(f"{path} has version {_short(version)}, expected {VERSION}")
    placements = {}
    for layer, value in content["layers"].items():
        if not _INDEX.fullmatch(layer):
            raise ConfigError(f"{path}: {_short(layer)} is not a layer index, expected 0, 1, …")
        try:
            placements[int(layer)] = ExpertPlacement.from_json(value)
        except ConfigError as error:
            raise ConfigError(f"{path}: layer {layer}: {error.message}") from None
    return placements


def _check_ranks(num_experts: int, ep_size: int) -> None:
    if whole_number("num_experts", num_experts) < whole_number("ep_size", ep_size):
        raise ConfigError(f"{num_experts} experts are too few for ep_size {ep_size}")


def _expert(value: object) -> int:
    """Convert a value to an expert id; -1, an invalid id, if it is not an integer."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return -1


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"


def check_placement(placement: ExpertPlacement) -> None:
    """Check the type of a placement.

    Args:
        placement: Value to check.

    Raises:
        ConfigError: It is not an ExpertPlacement.
    """
    if not isinstance(placement, ExpertPlacement):
        raise ConfigError(f"placement is {placement!r}, expected an ExpertPlacement")
