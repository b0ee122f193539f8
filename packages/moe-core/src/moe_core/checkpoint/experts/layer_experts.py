"""Access the expert tensors of one layer independently of their naming."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

from moe_core.checkpoint.config.families import refusal_of
from moe_core.checkpoint.config.keys import names_experts
from moe_core.checkpoint.files.safetensors_file import Part, TensorInfo
from moe_core.checkpoint.files.shards import PICKLE_HINT, pickled_files
from moe_core.checkpoint.files.staging import places_of
from moe_core.checkpoint.files.tensor_names import Key, LayerNames, parse_name
from moe_core.checkpoint.files.unsupported import unsupported_names
from moe_core.checkpoint.reader import Checkpoint
from moe_core.errors import CheckpointError, ConfigError

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


def find_layer(checkpoint: Checkpoint, index: int | None = None, stack: str | None = None) -> LayerExperts:
    """Find the experts of a layer.

    Args:
        checkpoint: The open checkpoint.
        index: Index of the layer; default the first one with experts.
        stack: First component of the tensor names of one stack of layers, see ``Checkpoint.expert_tensors``.

    Returns:
        The layer's expert tensors.

    Raises:
        CheckpointError: The layer has no experts, or they are incomplete or differ in shape or dtype.
        ConfigError: ``index`` is not an integer.
    """
    layers = checkpoint.expert_tensors(stack)
    if not layers:
        raise _no_experts(checkpoint)
    if index is None:
        index = next(iter(layers))
    elif isinstance(index, bool) or not hasattr(index, "__index__"):
        raise ConfigError(f"layer is {index!r}, expected the index of a layer: {ranges(layers)}")
    if index not in layers:
        raise CheckpointError(
            f"{checkpoint.path}: layer {index} has no MoE block; MoE layers: "
            f"{ranges(layers)}{left_out(checkpoint, index)}"
        )
    return checkpoint.once((stack, index), lambda: _collect(checkpoint, layers[index]))


def left_out(checkpoint: Checkpoint, layer: int | None = None) -> str:
    """Return a hint for errors about missing experts: an ignored file that contains some.

    Args:
        checkpoint: The open checkpoint.
        layer: Index of the layer with missing experts; default any layer.

    Returns:
        A clause that starts with "; ", or "" if no ignored file contains any.
    """

    def wanted(name: str) -> bool:
        parsed = parse_name(name)
        return parsed is not None and layer in (None, parsed.layer)

    return checkpoint.left_out(wanted)


def _no_experts(checkpoint: Checkpoint) -> CheckpointError:
    """Return the error for a checkpoint without experts, with the likely reason."""
    kind = checkpoint.config.get("model_type")
    refusal = refusal_of(kind) if isinstance(kind, str) else None
    pickled = pickled_files(checkpoint.path)
    foreign = unsupported_names(checkpoint.names)
    hint = left_out(checkpoint)
    if refusal is None and not pickled and foreign is None and not hint and not names_experts(checkpoint.config):
        return CheckpointError(
            f"{checkpoint.path} is a dense model (model_type {kind!r}): config.json names no experts and no tensor is "
            "one's; what is run here are the experts of mixture-of-experts models"
        )
    hint += f"; models of this type are not supported: {refusal}" if refusal is not None else ""
    hint += f"; the experts may be in {', '.join(pickled[:3])}: {PICKLE_HINT}" if pickled else ""
    hint += f"; {foreign}" if foreign is not None else ""
    return CheckpointError(
        f"{checkpoint.path}: no layer has MoE experts (model_type {kind!r}; no tensor is named "
        f"<block>.experts.<e>.<projection>.<suffix> or <block>.experts.<projection>){hint}"
    )


def _collect(checkpoint: Checkpoint, found: LayerNames) -> LayerExperts:
    for one, other in found.twice:
        raise CheckpointError(f"{one} and {other} are the same projection of the same expert")
    stacked = [tensors[None] for tensors in found.tensors.values() if None in tensors]
    names: dict[Key, tuple[str, ...]]
    if stacked:
        single = [name for tensors in found.tensors.values() for expert, name in tensors.items() if expert is not None]
        if single:
            raise CheckpointError(
                f"{found.prefix} mixes stacked experts ({stacked[0]}) and separate experts ({single[0]})"
            )
        names = {key: (tensors[None],) for key, tensors in found.tensors.items()}
        infos = _stacked_infos(checkpoint, names)
        experts = max(info.shape[0] for info in infos.values() if info.shape)
    else:
        names = _complete(checkpoint, found)
        infos = {key: _uniform_info(checkpoint, tensors) for key, tensors in names.items()}
        experts = len(next(iter(names.values())))
    _check_projections(checkpoint, found, frozenset(projection for projection, _ in infos))
    _refuse_others(checkpoint, found.prefix)
    return LayerExperts(checkpoint, found.prefix, found.block, found.layer, experts, bool(stacked), names, infos)


def _stacked_infos(checkpoint: Checkpoint, names: Mapping[Key, Sequence[str]]) -> dict[Key, TensorInfo]:
    infos = {key: checkpoint.info(name) for key, (name,) in names.items()}
    # The weights determine the number of experts. Tensors of shape [] and [1] hold a value shared by all experts.
    weights = [info for info in infos.values() if len(info.shape) >= 3]
    if not weights:
        one = next(iter(infos.values()))
        raise CheckpointError(f"{one.name} is {one}, expected weights [E, rows, columns]")
    experts = max(weights, key=lambda info: info.shape[0])
    for info in infos.values():
        if info.shape in ((), (1,)):
            continue
        if info.shape[0] != experts.shape[0] or info.shape[0] == 0:
            raise CheckpointError(
                f"{info.name} is {info}, expected [E, ...] with as many experts as {experts.name}, which is {experts}"
            )
    return infos


def _complete(checkpoint: Checkpoint, found: LayerNames) -> dict[Key, tuple[str, ...]]:
    """Return the names of per-expert tensors by expert; raise CheckpointError if one is missing."""
    experts = sorted({expert for tensors in found.tensors.values() for expert in tensors if expert is not None})
    for position, expert in enumerate(experts):
        if position != expert:
            sample = next(tensors[expert] for tensors in found.tensors.values() if expert in tensors)
            raise CheckpointError(
                f"expert {position} is missing: {sample} is there, tensors of {position} are not"
                f"{left_out(checkpoint, found.layer)}"
            )
    names: dict[Key, tuple[str, ...]] = {}
    for key, tensors in sorted(found.tensors.items()):
        if len(tensors) < len(experts):
            expert = next(expert for expert in experts if expert not in tensors)
            other, there = next(iter(tensors.items()))
            # The first number after the prefix is the expert id; the projection may precede or follow it.
            begin, _, end = there[len(found.prefix) :].partition(f".{other}.")
            missing = f"{found.prefix}{begin}.{expert}.{end}"
            raise CheckpointError(
                f"{missing} is missing in {checkpoint.path} ({there} is there){left_out(checkpoint, found.layer)}"
            )
        names[key] = tuple(map(tensors.__getitem__, experts))
    return names


def _uniform_info(checkpoint: Checkpoint, names: Sequence[str]) -> TensorInfo:
    """Return the common shape and dtype of the tensors; raise CheckpointError if they differ."""
    info = checkpoint.info(names[0])
    other = checkpoint.first_unlike(names)
    if other is not None:
        raise CheckpointError(f"{other} is {checkpoint.info(other)}, expected {info} as {info.name}")
    return info


def _check_projections(checkpoint: Checkpoint, layer: LayerNames, found: frozenset[str]) -> None:
    if found not in ({"gate", "up", "down"}, {"gate_up", "down"}, {"up", "down"}):
        raise CheckpointError(
            f"{layer.prefix} has the projections {', '.join(sorted(found))}; "
            f"expected gate, up and down, or gate_up and down, or up and down{left_out(checkpoint, layer.layer)}"
        )


def _refuse_others(checkpoint: Checkpoint, prefix: str) -> None:
    """Refuse tensors of no projection under ``prefix``: they may change what experts compute."""
    for name in checkpoint.no_projections:
        # Granite stores its experts next to the router, and Laguna its correction bias under the experts' prefix.
        if not prefix.endswith(".experts") or name == f"{prefix}.e_score_correction_bias":
            continue
        if name.startswith(f"{prefix}."):
            raise CheckpointError(
                f"{name} in {checkpoint.path} is unknown: it does not belong to a projection of an expert"
            )


def ranges(layers: Iterable[int]) -> str:
    """Format indices for a message: "3-60", "0, 2, 4-7".

    Args:
        layers: Distinct indices.

    Returns:
        Their ranges in ascending order.
    """
    parts: list[list[int]] = []
    for number in sorted(layers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
