"""Access the expert tensors of one layer independently of their naming."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

from moe_core.checkpoint.files.safetensors_file import Part, TensorInfo
from moe_core.checkpoint.files.staging import places_of
from moe_core.checkpoint.files.tensor_names import Key
from moe_core.checkpoint.reader import Checkpoint
from moe_core.errors import CheckpointError

Q = TypeVar("Q")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class LayerExperts:
    """Tensors of the routed experts of one layer, by expert, projection and suffix.

    All experts are complete, and the tensors of one projection and suffix have the same shape and dtype.

    Attributes:
        checkpoint: The checkpoint that stores the tensors.
        prefix: Name prefix of the experts ("model.layers.3.mlp.experts").
        block: Name prefix of the MoE block ("model.layers.3.mlp").
        index: Index of the layer.
        num_experts: Number of experts.
        stacked_names: Whether the checkpoint stores one tensor ``[E, ...]`` for all experts.
    """

    checkpoint: Checkpoint
    prefix: str
    block: str
    index: int
    num_experts: int
    stacked_names: bool
    _names: Mapping[Key, Sequence[str]]  # one name per expert, in order, or one name for all experts
    _infos: Mapping[Key, TensorInfo]
    _understood: dict[object, tuple[object, object]] = field(default_factory=dict, repr=False)
    _found: dict[object, object] = field(default_factory=dict, repr=False)

    def understood(self, quantization: Q, parse: Callable[[Q, LayerExperts], T]) -> T:
        """Return the cached result of ``parse(quantization, self)``, which several formats share.

        Args:
            quantization: Quantization settings of a tool; compared by identity, so it must not be modified.
            parse: Interprets the settings for a layer.

        Returns:
            The result of ``parse``.
        """
        given, found = self._understood.get(parse, (None, None))
        if given is not quantization:
            found = parse(quantization, self)
            self._understood[parse] = (quantization, found)
        return cast("T", found)

    def once(self, key: object, find: Callable[[], T]) -> T:
        """Return the cached result of ``find()`` for ``key``.

        Args:
            key: Hashable cache key.
            find: Computes the result; called on the first request for ``key`` only.

        Returns:
            The result of the first call.
        """
        if key not in self._found:
            self._found[key] = find()
        return cast("T", self._found[key])

    @property
    def stack(self) -> str:
        """The first component of the prefix, which names a stack of layers ("thinker")."""
        return self.prefix.partition(".")[0]

    @property
    def projections(self) -> frozenset[str]:
        """``{"gate", "up", "down"}``, ``{"gate_up", "down"}``, or ``{"up", "down"}`` without a gate."""
        return frozenset(projection for projection, _ in self._infos)

    @property
    def is_gated(self) -> bool:
        """Whether the experts have a gate projection."""
        return bool(self.projections & {"gate", "gate_up"})

    @property
    def is_linear(self) -> bool:
        """Whether this is a linear layer (:mod:`moe_core.checkpoint.linear`), not experts."""
        return self.projections == {"down"}

    @property
    def has_bias(self) -> bool:
        """Whether any projection has a bias."""
        return any(suffix == "bias" for _, suffix in self._infos)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes, as stored."""
        each = 1 if self.stacked_names else self.num_experts
        return each * sum(
            math.prod(info.shape) * (1 if info.dtype is None else info.dtype.itemsize) for info in self._infos.values()
        )

    def suffixes(self, projection: str) -> tuple[str, ...]:
        """Return the suffixes of a projection's tensors ("weight", "weight_scale_inv", …).

        Args:
            projection: One of ``projections``.

        Returns:
            The suffixes, sorted.
        """
        return tuple(sorted(suffix for found, suffix in self._infos if found == projection))

    def has(self, projection: str, suffix: str) -> bool:
        """Return whether a projection has tensors with a suffix.

        Args:
            projection: Name of the projection.
            suffix: Suffix of the tensors' names.

        Returns:
            True if it has.
        """
        return (projection, suffix) in self._infos

    def name(self, expert: int, projection: str, suffix: str) -> str:
        """Return the name of a tensor in the checkpoint.

        Args:
            expert: Global id of the expert.
            projection: One of ``projections``.
            suffix: Suffix of the tensor's name.

        Returns:
            The name; that of the stacked tensor if all experts share one.

        Raises:
            CheckpointError: There is no such tensor.
        """
        names = self._names.get((projection, suffix), ())
        at = 0 if self.stacked_names else expert
        if not 0 <= at < len(names):
            there = ", ".join(self.suffixes(projection)) or "nothing"
            raise CheckpointError(
                f"{self.prefix}: {suffix!r} of {projection!r} is missing for expert {expert} (there is: {there})"
            )
        return names[at]

    def _names_of(self, projection: str, suffix: str, experts: Sequence[int]) -> Iterable[str]:
        """Return :meth:`name` for several experts."""
        names = self._names.get((projection, suffix), ())
        if self.stacked_names or not names or min(experts, default=0) < 0 or max(experts, default=0) >= len(names):
            return [self.name(expert, projection, suffix) for expert in experts]
        return map(names.__getitem__, experts)

    def shape(self, projection: str, suffix: str) -> tuple[int, ...]:
        """Return the shape of one expert's tensor.

        Args:
            projection: One of ``projections``.
            suffix: Suffix of the tensor's name.

        Returns:
            The shape without the expert dimension.

        Raises:
            CheckpointError: There is no such tensor.
        """
        info = self._info(projection, suffix)
        return info.shape[1:] if self._per_expert(info) else info.shape

    def dtype(self, projection: str, suffix: str) -> torch.dtype | None:
        """Return the dtype of the tensors.

        Args:
            projection: One of ``projections``.
            suffix: Suffix of the tensors' names.

        Returns:
            The dtype, or None if torch does not have it.

        Raises:
            CheckpointError: There are no such tensors.
        """
        return self._info(projection, suffix).dtype

    def stored_dtype(self, projection: str, suffix: str) -> str:
        """Return the dtype of the tensors as safetensors spells it ("F8_E4M3").

        Args:
            projection: One of ``projections``.
            suffix: Suffix of the tensors' names.

        Returns:
            The dtype's name.

        Raises:
            CheckpointError: There are no such tensors.
        """
        return self._info(projection, suffix).stored_dtype

    def tensor(self, expert: int, projection: str, suffix: str) -> Tensor:
        """Read one expert's tensor exactly as stored.

        Args:
            expert: Global id of the expert.
            projection: One of ``projections``.
            suffix: Suffix of the tensor's name.

        Returns:
            A new tensor on the CPU.

        Raises:
            CheckpointError: There is no such tensor, or it cannot be read.
        """
        name = self.name(expert, projection, suffix)
        if self._per_expert(self._info(projection, suffix)):
            return self.checkpoint.part(name, expert)
        return self.checkpoint.tensor(name)

    def read_into(self, expert: int, projection: str, suffix: str, out: Tensor) -> None:
        """Read one expert's tensor into an existing tensor.

        Args:
            expert: Global id of the expert.
            projection: One of ``projections``.
            suffix: Suffix of the tensor's name.
            out: Contiguous CPU tensor of the stored dtype and shape.

        Raises:
            CheckpointError: There is no such tensor, or it cannot be read.
        """
        entry = expert if self._per_expert(self._info(projection, suffix)) else None
        self.checkpoint.read_into(self.name(expert, projection, suffix), out, entry)

    def stacked(self, projection: str, suffix: str, experts: Sequence[int]) -> Tensor:
        """Read the tensors of several experts into one tensor.

        Args:
            projection: One of ``projections``.
            suffix: Suffix of the tensors' names.
            experts: Global ids of the experts.

        Returns:
            ``[len(experts), ...]`` on the CPU.

        Raises:
            CheckpointError: There are no such tensors, or torch does not have their dtype.
        """
        return self.stacked_together(((projection, suffix),), experts)[projection, suffix]

    def stacked_together(self, keys: Iterable[Key], experts: Sequence[int]) -> dict[Key, Tensor]:
        """Read :meth:`stacked` for several projections and suffixes, in one pass over the file.

        Args:
            keys: (projection, suffix) of each stack.
            experts: Global ids of the experts.

        Returns:
            ``[len(experts), ...]`` on the CPU for each key.

        Raises:
            CheckpointError: There are no such tensors, or torch does not have their dtype.
        """
        found: dict[Key, Tensor] = {}
        for projection, suffix in keys:
            dtype = self.dtype(projection, suffix)
            if dtype is None:
                name = self.name(0, projection, suffix)
                raise CheckpointError(
                    f"{name} has the type {self.stored_dtype(projection, suffix)}, which torch does not support"
                )
            shape = (len(experts), *self.shape(projection, suffix))
            found[projection, suffix] = torch.empty(shape, dtype=dtype, device="cpu")
        self.read_all(experts, {key: places_of(out) for key, out in found.items()})
        return found

    def read_all(self, experts: Sequence[int], outs: Mapping[Key, Sequence[memoryview]]) -> None:
        """Read tensors of several projections and suffixes into buffers, in file order.

        Args:
            experts: Global ids of the experts.
            outs: For each (projection, suffix), one byte buffer per expert; empty if the tensors have no elements.

        Raises:
            CheckpointError: There are no such tensors, or they cannot be read.
        """
        parts: list[Part] = []
        for (projection, suffix), places in outs.items():
            if self._per_expert(self._info(projection, suffix)):
                name = self.name(0, projection, suffix)
                parts += [(name, expert, place) for expert, place in zip(experts, places, strict=bool(places))]
            else:
                names = self._names_of(projection, suffix, experts)
                parts += [(name, None, place) for name, place in zip(names, places, strict=bool(places))]
        self.checkpoint.read_all(parts)

    def _per_expert(self, info: TensorInfo) -> bool:
        """Return whether the tensor has an expert dimension; a value shared by all experts has none."""
        return self.stacked_names and info.shape[:1] == (self.num_experts,)

    def _info(self, projection: str, suffix: str) -> TensorInfo:
        info = self._infos.get((projection, suffix))
        if info is None:
            self.name(0, projection, suffix)
            raise CheckpointError(f"{self.prefix}: {suffix!r} of {projection!r} is missing")
        return info

    def __repr__(self) -> str:
        return f"LayerExperts({self.prefix!r}, {self.num_experts} experts)"
