"""What a caller asks for when a layer of a checkpoint is loaded, and the first step: describing the layer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_core.errors import ConfigError
from moe_core.parallel.checks import check_placed
from moe_core.spec.config import FusedMoEParallelConfig

if TYPE_CHECKING:
    from moe_core.checkpoint import Checkpoint, LayerSource, ModelSettings
    from moe_core.kernels.ops.online import OnlineQuantization
    from moe_core.parallel.distributed.groups import ParallelGroups
    from moe_core.parallel.placement.placement import ExpertPlacement
    from moe_core.spec.quant_key import QuantKey


@dataclass(frozen=True)
class LayerRequest:
    """Which layer of a checkpoint to load, and how.

    A loaded layer keeps its request, so that a reload reads another checkpoint in the same way.

    Attributes:
        layer: Index in the model; None for the first layer with experts.
        device: Device to load to; None for the GPU if there is one, otherwise the CPU.
        backend: Backend name, or "auto".
        dtype: Dtype of hidden states.
        experts: Global ids of the experts to load; None for all of this rank, which ``groups`` with a ``placement``
            replace by the rank's experts.
        parallel: Rank whose shard is read; None for the rank of ``groups``, or a single rank.
        groups: Process groups of the ranks.
        placement: Placement of experts on the ranks of ``groups``.
        online: Online quantization of 16-bit experts.
        activation_key: Quantization of activations, as in :func:`moe_core.load_layer`.
        max_loras: Number of LoRA slots.
        max_lora_rank: Rank of the LoRA slots.
        max_num_tokens: Largest number of tokens that a rank brings.
        stack: Stack of layers, for a model with several.
        settings: Settings that take precedence over config.json.
    """

    layer: int | None = None
    device: torch.device | None = None
    backend: str = "auto"
    dtype: torch.dtype = torch.bfloat16
    experts: Sequence[int] | None = None
    parallel: FusedMoEParallelConfig | None = None
    groups: ParallelGroups | None = None
    placement: ExpertPlacement | None = None
    online: OnlineQuantization | None = None
    activation_key: QuantKey | str | None = "checkpoint"
    max_loras: int = 0
    max_lora_rank: int = 16
    max_num_tokens: int | None = None
    stack: str | None = None
    settings: ModelSettings | None = None

    def __post_init__(self) -> None:
        if self.parallel is not None and not isinstance(self.parallel, FusedMoEParallelConfig):
            raise ConfigError(f"parallel is {self.parallel!r}, expected a FusedMoEParallelConfig")
        check_placed(self.groups, self.placement)
        if self.groups is None:
            return
        parallel = self.parallel or self.groups.parallel
        object.__setattr__(self, "parallel", parallel)
        if self.placement is not None and self.experts is None:
            if self.placement.ep_size != parallel.ep_size:
                raise ConfigError(
                    f"the placement is for {self.placement.ep_size} ranks, but ep_size is {parallel.ep_size}"
                )
            object.__setattr__(self, "experts", self.placement.ranks[parallel.ep_rank])


def describe(checkpoint: Checkpoint, request: LayerRequest) -> LayerSource:
    """Find the names, shapes, config and format of the requested layer, without reading its weights.

    Args:
        checkpoint: The open checkpoint.
        request: What to load.

    Returns:
        The layer in the checkpoint.

    Raises:
        CheckpointError: The layer is missing, invalid or not read by any installed format.
        ConfigError: Invalid or inconsistent arguments.
    """
    from moe_core.checkpoint import read_layer

    return read_layer(
        checkpoint,
        request.layer,
        dtype=request.dtype,
        experts=request.experts,
        quantize=request.online,
        activation_key=request.activation_key,
        stack=request.stack,
        settings=request.settings,
        parallel=request.parallel,
    )


def opened(path: Checkpoint | str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint from a path; return a Checkpoint as it is.

    Args:
        path: Folder, or an open checkpoint.

    Returns:
        The open checkpoint.
    """
    from moe_core.checkpoint import Checkpoint

    return path if isinstance(path, Checkpoint) else Checkpoint.open(path)
