"""Checkpoint formats: what an adapter implements.

An adapter knows one way of storing quantised experts.  It looks at a layer once (:meth:`CheckpointFormat.resolve`),
and says how the layer lies, as an :class:`ExpertLayout` that loads it, or why the layer is not of its format.  What is
loaded are the scheme's canonical weights; an adapter never meets a backend.  It decides from the tensors as much as
from config.json, since tools write configs that don't fit their own files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import MoEWeights

if TYPE_CHECKING:
    from moe_core.checkpoint.experts.layer_experts import LayerExperts


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

    def check_fits(self, config: FusedMoEConfig, *, experts: Sequence[int]) -> None:  # noqa: B027 (optional)
        """Raise CheckpointError where :meth:`load` would for a name, shape or dtype; reads headers, small tensors."""

    @property
    def column_unit(self) -> int | None:
        """Columns of the intermediate size that must be read together; None where all of them must be.

        Where it is a number, :meth:`load_columns` reads those of a tensor-parallel rank alone.
        """
        return None

    def load_columns(
        self,
        config: FusedMoEConfig,
        begin: int,
        end: int,
        *,
        experts: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> MoEWeights:
        """:meth:`load` of the columns ``begin`` to ``end`` of the intermediate size; ``config`` is the whole layer's.

        Both are multiples of :attr:`column_unit`, or ``end`` is the intermediate size.
        """
        raise NotImplementedError


class CheckpointFormat(ABC):
    """One checkpoint format of a scheme.

    ``name`` for people ("fp8 block"); ``quant_methods`` that it may read: where some format names the checkpoint's
    method, only those that do say why they don't read it.  A format that another package adds to a scheme states the
    ``format_api`` that it was written for; a scheme's own are covered by the scheme's.
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
