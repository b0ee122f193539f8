"""Checkpoint formats: what an adapter implements.

An adapter knows one way of storing quantised experts.  It looks at a layer once (:meth:`CheckpointFormat.resolve`),
and says how the layer lies, as an :class:`ExpertLayout` that loads it, or why the layer is not of its format.  What is
loaded are the scheme's canonical weights; an adapter never meets a backend.  It decides from the tensors as much as
from config.json, since tools write configs that don't fit their own files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.reading_threads import in_threads
from moe_core.checkpoint.statements import tool
from moe_core.config import FusedMoEConfig
from moe_core.errors import CheckpointError
from moe_core.quant_key import QuantKey
from moe_core.weights import MoEWeights


@dataclass(frozen=True, eq=False)
class ExpertLayout(ABC):
    """How one layer's experts lie in a checkpoint, as a format found it out.

    - ``layer``: the tensors
    - ``weight_key``, ``activation_key``: what the canonical weights and the activations are, None for 16 bits
    """

    layer: LayerExperts
    weight_key: QuantKey | None
    activation_key: QuantKey | None

    @abstractmethod
    def load(self, config: FusedMoEConfig, *, experts: Sequence[int], device: torch.device | str = "cpu") -> MoEWeights:
        """Canonical weights of ``experts`` (global ids, in this order) on ``device``.

        Tensors are allocated once and filled expert by expert, so that no second copy of the layer exists.
        Raises CheckpointError with the name of the tensor for anything that doesn't fit ``config``.
        """


class CheckpointFormat(ABC):
    """One checkpoint format of a scheme.

    ``name`` for people ("fp8 block"); ``quant_methods`` that it may read: where some format names the checkpoint's
    method, only those that do say why they don't read it.  A format that another package adds to a scheme states the
    ``protocol_version`` that it was written for; a scheme's own are covered by the scheme's.
    """

    name: ClassVar[str]
    quant_methods: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def resolve(self, quantization: Mapping[str, Any], layer: LayerExperts) -> ExpertLayout | str:
        """How the layer lies, or in one clause why its tensors are not of this format.

        Looks at names, shapes, dtypes and ``quantization`` (what the folder's JSON files say), and reads no data but
        small tensors that say how others lie.  Tensors that are of this format but broken belong to it:
        :meth:`ExpertLayout.load` says what is wrong with them.
        A CheckpointError stands where no other format reads the layer; any other exception leaves the format out.
        """


def names_method(quant_methods: Sequence[str], method: object) -> bool:
    """Whether ``quant_methods`` has ``method``, or the tool that it is a variant of ("modelopt_mixed")."""
    return method in quant_methods or ("modelopt" in quant_methods and tool(method) == "modelopt")


def check_expert_tensor(
    layer: LayerExperts,
    projection: str,
    suffix: str,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    why: str = "",
    *,
    also: Sequence[Sequence[int]] = (),
) -> None:
    """CheckpointError unless the projection's tensors, of every expert, have this shape and one of these dtypes.

    ``also``: other shapes of the same values; the message names ``shape`` alone.
    """
    name = layer.name(0, projection, suffix)
    found = layer.shape(projection, suffix)
    reason = f" ({why})" if why else ""
    if found not in {tuple(accepted) for accepted in (shape, *also)}:
        raise CheckpointError(f"{name} has shape {list(found)}, expected {list(shape)}{reason}")
    if layer.dtype(projection, suffix) not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        stored = layer.dtype(projection, suffix)
        stated = layer.stored_dtype(projection, suffix) if stored is None else str(stored).removeprefix("torch.")
        raise CheckpointError(f"{name} has dtype {stated}, expected {expected}{reason}")


def load_stacked(
    layer: LayerExperts,
    projections: Sequence[str],
    suffix: str,
    *,
    experts: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    arrange: Callable[[Tensor], Tensor] | None = None,
    check: Callable[[Tensor], Tensor] | None = None,
    on_device: bool = False,
) -> Tensor:
    """Tensors of ``projections``, one below the other, for each expert: ``[len(experts), rows, ...]`` on ``device``.

    - ``dtype``: converted to it; default: as stored
    - ``arrange``: one expert's stored tensor on the CPU -> what is kept of it; ``on_device``: the tensor is brought to
      ``device`` before, where moving its bytes about is quicker
    - ``check``: what is kept, on ``device`` -> bool scalar there, True if it must be refused; all are looked at once,
      so a GPU is waited for once.  The error of a refused one is the caller's: CheckpointError with its name.
    """
    if not experts:
        raise CheckpointError(f"{layer.prefix}: no expert was asked for")
    # as stored, on the CPU: from the file straight to its place
    in_place = arrange is None and torch.device(device).type == "cpu"
    in_place = in_place and all(
        layer.dtype(p, suffix) == (dtype or layer.dtype(projections[0], suffix)) for p in projections
    )

    def arranged(expert: int, projection: str) -> Tensor:
        part = layer.tensor(expert, projection, suffix)
        if on_device:
            part = part.to(device)
        return part if arrange is None else arrange(part)

    first = [] if in_place else [arranged(experts[0], projection) for projection in projections]
    shapes = [layer.shape(p, suffix) for p in projections] if in_place else [part.shape for part in first]
    kept = dtype or (layer.dtype(projections[0], suffix) if in_place else first[0].dtype)
    shape = (len(experts), sum(shape[0] for shape in shapes), *shapes[0][1:])
    out = torch.empty(shape, dtype=kept, device=device)

    def fill(slot: int) -> list[Tensor]:
        """What ``check`` says of each projection of one expert, which is put into its place."""
        found = []
        start = 0
        for number, projection in enumerate(projections):
            place = out[slot, start : start + shapes[number][0]]
            if in_place:
                layer.read_into(experts[slot], projection, suffix, place)
            else:
                place.copy_(first[number] if slot == 0 else arranged(experts[slot], projection))
            start += shapes[number][0]
            if check is not None:
                found.append(check(place))
        return found

    bad = [flag for flags in in_threads(fill, len(experts), out.nbytes) for flag in flags]
    if bad:
        refused = torch.stack(bad).nonzero()
        if refused.numel():
            slot, number = divmod(int(refused[0]), len(projections))
            expert, projection = experts[slot], projections[number]
            name = layer.name(expert, projection, suffix) + _entry(layer, expert)
            raise BadValuesError(name, len(refused), len(bad), expert=expert, projection=projection)
    return out


def _entry(layer: LayerExperts, expert: int) -> str:
    return f"[{expert}]" if layer.stacked_names else ""


class BadValuesError(CheckpointError):
    """Values that a check refused; ``tensor``, ``expert`` and ``projection``: the first one's name and whose it is."""

    def __init__(self, tensor: str, count: int, total: int, *, expert: int = 0, projection: str = "") -> None:
        super().__init__(f"{tensor} holds values that are refused ({count} of {total} tensors do)")
        self.tensor = tensor
        self.count = count
        self.expert = expert
        self.projection = projection
