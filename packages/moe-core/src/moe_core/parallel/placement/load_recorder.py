"""Count on the device how often each expert is chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_dtype, check_instance, check_tensor
from moe_core.spec.config import whole_number
from moe_core.spec.device import as_torch_device


class ExpertLoadRecorder:
    """Token counts per expert, for each layer of a model.

    :meth:`record` does not synchronize and allocates no counters, so it can be captured in CUDA graphs, whose replays
    count too. Ranks that route different tokens count separately: sum the :attr:`counts` of all ranks (``all_reduce``)
    before planning.

    Args:
        num_layers: Number of layers.
        num_experts: Number of experts per layer.
        device: Device of the counters.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device | str | None = None) -> None:
        layers, experts = whole_number("num_layers", num_layers), whole_number("num_experts", num_experts)
        # The last column counts ids that are not experts, so that these need no special case.
        self._all = torch.zeros((layers, experts + 1), dtype=torch.int64, device=as_torch_device(device))

    @property
    def counts(self) -> Tensor:
        """Counts, int64 ``[layers, E]`` on the device: a view that is updated by later calls."""
        return self._all[:, :-1]

    def record(self, layer: int, topk_ids: Tensor) -> None:
        """Count the chosen experts of a layer.

        Args:
            layer: Index of the layer.
            topk_ids: Chosen experts, int32 or int64 ``[M, k]``; ids out of range are not counted.

        Raises:
            ConfigError: The layer does not exist.
            TensorError: The ids are on another device, or have the wrong dtype.
        """
        layers, bins = self._all.shape
        layer = whole_number("layer", layer, 0)
        if layer >= layers:
            raise ConfigError(f"layer is {layer}, the recorder has layers 0 to {layers - 1}")
        check_tensor("topk_ids", topk_ids)
        check_dtype("topk_ids", topk_ids, (torch.int32, torch.int64))
        if topk_ids.device != self._all.device:
            raise TensorError(f"topk_ids is on {topk_ids.device}, the recorder counts on {self._all.device}")
        ids = topk_ids.reshape(-1).long()
        ids = torch.where((ids >= 0) & (ids < bins - 1), ids, bins - 1)
        self._all[layer].scatter_add_(0, ids, torch.ones_like(ids))

    def decay(self, factor: float = 0.5) -> None:
        """Scale down the counts so far, so that they follow changing loads.

        Args:
            factor: Factor from 0 (forget everything) to 1.

        Raises:
            ConfigError: The factor is out of range.
        """
        check_instance("factor", factor, int, float)
        if not 0 <= factor <= 1:
            raise ConfigError(f"factor is {factor!r}, expected a number from 0 to 1")
        self._all.copy_((self._all.double() * factor).long())
