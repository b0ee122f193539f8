"""The expert tensors of one layer, whatever their naming."""

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

    - ``prefix`` of the experts ("model.layers.3.mlp.experts"), ``block`` ("model.layers.3.mlp"), ``index`` of the layer
    - ``stack``: first part of the prefix, by which models with several stacks of layers name them ("thinker")
    - ``projections``: ``{"gate", "up", "down"}``, ``{"gate_up", "down"}``, or ``{"up", "down"}`` without a gate
    - ``stacked_names``: the checkpoint holds one tensor ``[E, ...]`` for all experts

    All experts are complete, and tensors of one projection and suffix agree in shape and dtype.
    """

    checkpoint: Checkpoint
    prefix: str
    block: str
    index: int
    num_experts: int
    stacked_names: bool
    _names: Mapping[Key, Sequence[str]]  # in the order of experts, or one of all
    _infos: Mapping[Key, TensorInfo]
    _understood: dict[object, tuple[object, object]] = field(default_factory=dict, repr=False)
    _found: dict[object, object] = field(default_factory=dict, repr=False)

    def understood(self, quantization: Q, parse: Callable[[Q, LayerExperts], T]) -> T:
        """``parse(quantization, self)``, done once: several formats ask what one tool's config says of a layer.

        ``quantization`` is known by identity, and must stay as it is.
        """
        given, found = self._understood.get(parse, (None, None))
        if given is not quantization:
            found = parse(quantization, self)
            self._understood[parse] = (quantization, found)
        return cast("T", found)

    def once(self, key: object, find: Callable[[], T]) -> T:
        """What ``find()`` returned the first time for ``key``."""
        if key not in self._found:
            self._found[key] = find()
        return cast("T", self._found[key])

    @property
    def stack(self) -> str:
        return self.prefix.partition(".")[0]

    @property
    def projections(self) -> frozenset[str]:
        return frozenset(projection for projection, _ in self._infos)

    @property
    def is_gated(self) -> bool:
        return bool(self.projections & {"gate", "gate_up"})

    @property
    def is_linear(self) -> bool:
        """Whether it is a linear layer beside the experts, shown as one (:mod:`moe_core.checkpoint.linear`)."""
        return self.projections == {"down"}

    @property
    def has_bias(self) -> bool:
        return any(suffix == "bias" for _, suffix in self._infos)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        each = 1 if self.stacked_names else self.num_experts
        return each * sum(
            math.prod(info.shape) * (1 if info.dtype is None else info.dtype.itemsize) for info in self._infos.values()
        )

    def suffixes(self, projection: str) -> tuple[str, ...]:
        """Suffixes of the projection's tensors ("weight", "weight_scale_inv", …), sorted."""
        return tuple(sorted(suffix for found, suffix in self._infos if found == projection))

    def has(self, projection: str, suffix: str) -> bool:
        return (projection, suffix) in self._infos

    def name(self, expert: int, projection: str, suffix: str) -> str:
        """Name in the checkpoint; CheckpointError where there is no such tensor."""
        names = self._names.get((projection, suffix), ())
        at = 0 if self.stacked_names else expert
        if not 0 <= at < len(names):
            there = ", ".join(self.suffixes(projection)) or "nothing"
            raise CheckpointError(
                f"{self.prefix}: {suffix!r} of {projection!r} is missing for expert {expert} (there is: {there})"
            )
        return names[at]

    def _names_of(self, projection: str, suffix: str, experts: Sequence[int]) -> Iterable[str]:
        """:meth:`name` of several experts."""
        names = self._names.get((projection, suffix), ())
        if self.stacked_names or not names or min(experts, default=0) < 0 or max(experts, default=0) >= len(names):
            return [self.name(expert, projection, suffix) for expert in experts]
        return map(names.__getitem__, experts)

    def shape(self, projection: str, suffix: str) -> tuple[int, ...]:
        """Shape of one expert's tensor."""
        info = self._info(projection, suffix)
        return info.shape[1:] if self._per_expert(info) else info.shape

    def dtype(self, projection: str, suffix: str) -> torch.dtype | None:
        """dtype of the tensors; None for one that torch has not."""
        return self._info(projection, suffix).dtype

    def stored_dtype(self, projection: str, suffix: str) -> str:
        """dtype as safetensors spells it, e.g. "F8_E4M3"."""
        return self._info(projection, suffix).stored_dtype

    def tensor(self, expert: int, projection: str, suffix: str) -> Tensor:
        """One expert's tensor, on the CPU, exactly as stored; a copy."""
        name = self.name(expert, projection, suffix)
        if self._per_expert(self._info(projection, suffix)):
            return self.checkpoint.part(name, expert)
        return self.checkpoint.tensor(name)

    def read_into(self, expert: int, projection: str, suffix: str, out: Tensor) -> None:
        """Read :meth:`tensor` into ``out``: contiguous, on the CPU, of its dtype and shape."""
        entry = expert if self._per_expert(self._info(projection, suffix)) else None
        self.checkpoint.read_into(self.name(expert, projection, suffix), out, entry)

    def stacked(self, projection: str, suffix: str, experts: Sequence[int]) -> Tensor:
        """``[len(experts), ...]`` on the CPU."""
        return self.stacked_together(((projection, suffix),), experts)[projection, suffix]

    def stacked_together(self, keys: Iterable[Key], experts: Sequence[int]) -> dict[Key, Tensor]:
        """:meth:`stacked` of several projections and suffixes; what lies side by side in the file is read at once."""
        found: dict[Key, Tensor] = {}
        for projection, suffix in keys:
            dtype = self.dtype(projection, suffix)
            if dtype is None:
                name = self.name(0, projection, suffix)
                raise CheckpointError(
                    f"{name} has the type {self.stored_dtype(projection, suffix)}, which torch has not"
                )
            shape = (len(experts), *self.shape(projection, suffix))
            found[projection, suffix] = torch.empty(shape, dtype=dtype, device="cpu")
        self.read_all(experts, {key: places_of(out) for key, out in found.items()})
        return found

    def read_all(self, experts: Sequence[int], outs: Mapping[Key, Sequence[memoryview]]) -> None:
        """Read :meth:`stacked` of several projections and suffixes into their ``outs``, in the order of the file.

        ``outs``: for each expert the place of its tensor's bytes; none where it has no elements.
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
        """Whether the tensor's first dimension counts experts (a value shared by all has none)."""
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
    """The experts of layer ``index``, or of the first layer that has any; ``stack`` as for Checkpoint.expert_tensors.

    Raises CheckpointError where there are none, or they are incomplete or of different shapes.
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
            f"{checkpoint.path}: layer {index} has no MoE; layers that have: {ranges(layers)}"
            f"{left_out(checkpoint, index)}"
        )
    return checkpoint.once((stack, index), lambda: _collect(checkpoint, layers[index]))


def left_out(checkpoint: Checkpoint, layer: int | None = None) -> str:
    """What to add where experts (of a ``layer``) are missing: the file that holds some and is not read."""

    def wanted(name: str) -> bool:
        parsed = parse_name(name)
        return parsed is not None and layer in (None, parsed.layer)

    return checkpoint.left_out(wanted)


def _no_experts(checkpoint: Checkpoint) -> CheckpointError:
    """Why no layer of the checkpoint has experts: what holds them instead, or that the model is dense."""
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
                f"{found.prefix} mixes stacked experts ({stacked[0]}) and experts one by one ({single[0]})"
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
    # the weights say how many experts there are; [] and [1] hold a value that all of them share
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
    """Names of tensors of experts one by one, in the order of experts; CheckpointError where one is missing."""
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
            # behind the prefix the first number is the expert's, with a projection before or after it
            begin, _, end = there[len(found.prefix) :].partition(f".{other}.")
            missing = f"{found.prefix}{begin}.{expert}.{end}"
            raise CheckpointError(
                f"{missing} is missing in {checkpoint.path} ({there} is there){left_out(checkpoint, found.layer)}"
            )
        names[key] = tuple(map(tensors.__getitem__, experts))
    return names


def _uniform_info(checkpoint: Checkpoint, names: Sequence[str]) -> TensorInfo:
    """What all of the tensors are; CheckpointError where they differ in shape or dtype."""
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
    """CheckpointError for a tensor under ``prefix`` that is no projection's: experts compute with it."""
    for name in checkpoint.no_projections:
        # Granite's experts lie beside the router, Laguna's correction bias among the experts
        if not prefix.endswith(".experts") or name == f"{prefix}.e_score_correction_bias":
            continue
        if name.startswith(f"{prefix}."):
            raise CheckpointError(
                f"{name} in {checkpoint.path} is not understood: it belongs to no expert's projection"
            )


def ranges(layers: Iterable[int]) -> str:
    """ "3-60", "0, 2, 4-7"."""
    parts: list[list[int]] = []
    for number in sorted(layers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
