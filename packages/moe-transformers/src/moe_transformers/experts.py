"""A layer of moe-core where a block of transformers has its experts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from moe_core import ConfigError, FusedMoELayer, share_workspace
from torch import Tensor, nn


class MoeCoreExperts(nn.Module):
    """The routed experts of one block; routing stays with the block.

    Without a ``layer`` it keeps their place while the rest of a model is loaded.  Its weights are no parameters: they
    are in the layout of the layer's backend, so ``state_dict()`` and ``save_pretrained`` refuse them (see
    :class:`moe_core.FusedMoELayer`).
    """

    layer: FusedMoELayer | None

    def __init__(self, layer: FusedMoELayer | None = None) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The experts' sum weighted by ``top_k_weights`` of ``hidden_states`` [..., K], of the same shape.

        ``top_k_index`` [..., k] int64 and ``top_k_weights`` [..., k] in float32 or 16 bits are what the router chose;
        an id that is no expert's selects nothing.

        Raises TensorError for arguments of another shape, dtype or device, and outside ``torch.no_grad()`` for those
        that require grad: no gradients are computed.
        """
        if self.layer is None:
            raise ConfigError("the experts are not loaded yet")
        return run_experts(self.layer, hidden_states, top_k_index, top_k_weights)


def run_experts(layer: FusedMoELayer, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What :meth:`MoeCoreExperts.forward` returns, by any ``layer``."""
    if top_k_index.dim() != 2 or top_k_weights.dim() != 2:
        k = layer.config.top_k
        top_k_index, top_k_weights = top_k_index.reshape(-1, k), top_k_weights.reshape(-1, k)
    output: Tensor = layer(hidden_states, topk_weights=top_k_weights, topk_ids=top_k_index)
    return output


def share_workspaces(layers: Iterable[FusedMoELayer]) -> None:
    """On GPUs, one workspace per device for all ``layers`` of a model: one call of the model runs at a time.

    A layer that has one keeps it, since captured graphs may write into it.
    """
    by_device: dict[torch.device, list[FusedMoELayer]] = {}
    for layer in layers:
        if layer.kernel.workspace is None:
            by_device.setdefault(layer.weights.device, []).append(layer)
    for device, there in by_device.items():
        if device.type != "cpu":
            share_workspace(there, 1)
