"""Interface of checkpoint format adapters.

An adapter knows one way of storing quantized experts. It examines a layer once (:meth:`CheckpointFormat.resolve`) and
returns either an :class:`ExpertLayout` that can load it, or the reason why the layer is not in its format. Loading
produces the scheme's canonical weights; adapters do not depend on backends. An adapter decides from the tensors as
much as from config.json, because some tools write configs that do not match their files.
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
    """How one layer's experts are stored in a checkpoint, as detected by a format.

    Attributes:
        layer: The tensors.
        weight_key: Quantization key of the canonical weights; None for 16 bits.
        activation_key: Quantization key of the activations; None for 16 bits.
    """

    layer: LayerExperts
    weight_key: QuantKey | None
    activation_key: QuantKey | None

    @abstractmethod
    def load(self, config: FusedMoEConfig, *, experts: Sequence[int], device: torch.device | str = "cpu") -> MoEWeights:
        """Load the canonical weights of some experts.

        Tensors are allocated once and filled expert by expert, so that no second copy of the layer exists.

        Args:
            config: Configuration of the layer.
            experts: Global expert ids, in the order of the result.
            device: Device of the weights.

        Returns:
            The weights.

        Raises:
            CheckpointError: A tensor does not fit ``config``; the message names it.
        """

    def check_fits(self, config: FusedMoEConfig, *, experts: Sequence[int]) -> None:  # noqa: B027 (optional)
        """Raise the errors of :meth:`load` for names, shapes and dtypes, without loading.

        Reads headers and small tensors only.

        Args:
            config: Configuration of the layer.
            experts: Global expert ids.

        Raises:
            CheckpointError: A tensor does not fit ``config``.
        """

    @property
    def column_unit(self) -> int | None:
        """Number of columns of the intermediate size that must be read together.

        None if all of them must be. Otherwise :meth:`load_columns` can read the columns of one tensor-parallel rank.
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
        """Load a range of columns of the intermediate size, like :meth:`load`.

        Args:
            config: Configuration of the whole layer.
            begin: First column, a multiple of :attr:`column_unit`.
            end: End of the range: a multiple of :attr:`column_unit`, or the intermediate size.
            experts: Global expert ids, in the order of the result.
            device: Device of the weights.

        Returns:
            The weights.

        Raises:
            CheckpointError: A tensor does not fit ``config``.
        """
        raise NotImplementedError


class CheckpointFormat(ABC):
    """One checkpoint format of a scheme.

    A format that another package adds to a scheme also declares the ``format_api`` that it was written for. A
    scheme's own formats use the version of the scheme.

    Attributes:
        name: Name for users ("fp8 block").
        quant_methods: ``quant_method`` values that the format may read. If some format lists the checkpoint's method,
            only the formats that list it report why they cannot read the layer.
    """

    name: ClassVar[str]
    quant_methods: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def resolve(self, quantization: Mapping[str, Any], layer: LayerExperts) -> ExpertLayout | str:
        """Detect how a layer is stored.

        The method looks at names, shapes, dtypes and ``quantization``. It reads no data except small tensors that
        describe how others are stored. Tensors in this format that are malformed still belong to it:
        :meth:`ExpertLayout.load` reports what is wrong.

        Args:
            quantization: Quantization settings from the folder's JSON files.
            layer: Tensors of the layer's experts.

        Returns:
            The layout; or, in one clause, why the tensors are not in this format.

        Raises:
            CheckpointError: Reported if no other format reads the layer. Any other exception disables the format.
        """
