"""How often experts are chosen, counted on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_dtype, check_instance, check_tensor
from moe_core.spec.config import whole_number
from moe_core.spec.device import as_torch_device


class ExpertLoadRecorder:
    """Counts of tokens per expert, for each of a model's layers.

    :meth:`record` waits for nothing and allocates no counts, so it runs in CUDA graphs, whose replays count too.  Ranks
    that route tokens of their own count their own: :attr:`counts` of all of them are added (``all_reduce``) before they
    are planned with.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device | str | None = None) -> None:
        layers, experts = whole_number("num_layers", num_layers), whole_number("num_experts", num_experts)
        # the last column counts ids of no expert, so that none need be looked for
        self._all = torch.zeros((layers, experts + 1), dtype=torch.int64, device=as_torch_device(device))

    @property
    def counts(self) -> Tensor:
        """[layers, E] int64, on the device: a view that goes on counting."""
        return self._all[:, :-1]

    def record(self, layer: int, topk_ids: Tensor) -> None:
        """Count the experts that ``topk_ids`` [M, k] name; ids of no expert count nothing.

        Raises ConfigError for a layer that is not there, TensorError for ids on another device.
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
        """Let what was counted so far count ``factor`` of it, from 0 (forget it) to 1: so counts follow loads."""
        check_instance("factor", factor, int, float)
        if not 0 <= factor <= 1:
            raise ConfigError(f"factor is {factor!r}, expected a number from 0 to 1")
        self._all.copy_((self._all.double() * factor).long())
