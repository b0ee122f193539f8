"""Modules that run a transformers block's experts as a layer of moe-core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from moe_core import ConfigError, FusedMoELayer, share_workspace
from moe_core.api.models import ExpertsForm
from torch import Tensor, nn

from moe_transformers.adapters import guard_adapters
from moe_transformers.saving import guard_saving


class MoeCoreExperts(nn.Module):
    """The routed experts of one block; routing stays in the block.

    The weights are not parameters, since they have the layout of the layer's backend. ``state_dict()`` therefore omits
    them and ``save_pretrained`` refuses the model (see :class:`moe_core.FusedMoELayer`). ``load_state_dict()`` takes
    tensors of transformers' experts in the layout that ``form`` describes.

    Args:
        layer: layer of moe-core; None while the rest of the model is being loaded.
        form: tensor layout of the transformers module that this one replaces.
    """

    layer: FusedMoELayer | None
    form: ExpertsForm | None

    def __init__(self, layer: FusedMoELayer | None = None, form: ExpertsForm | None = None) -> None:
        super().__init__()
        _guard()
        self.layer = layer
        self.form = form

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _guard()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts and sum their outputs, weighted by ``top_k_weights``.

        Args:
            hidden_states: [..., K].
            top_k_index: int64 [..., k], expert ids from the router; an invalid id selects no expert.
            top_k_weights: [..., k], router weights in float32 or 16 bits.

        Returns:
            Output of the shape of ``hidden_states``.

        Raises:
            TensorError: a shape, dtype or device is wrong, or an argument requires grad outside ``torch.no_grad()``,
                since no
                gradients are computed.
            ConfigError: the experts are not loaded yet.
        """
        if self.layer is None:
            raise ConfigError("the experts are not loaded yet")
        return run_experts(self.layer, hidden_states, top_k_index, top_k_weights)

    def check_state_dict(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Check the experts in a state dict that is about to be loaded into the model.

        Args:
            state_dict: state dict of the model.
            prefix: prefix of the module's names.

        Raises:
            ConfigError: the experts do not fit, or are not loaded yet.
        """
        given = _own_entries(state_dict, prefix)
        if given and self.layer is None:
            raise ConfigError(
                f"load_state_dict() cannot take {prefix}{next(iter(given))}: the experts are not loaded yet"
            )
        if self.layer is not None:
            self.layer.check_experts(given, prefix, self.form)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        self.check_state_dict(state_dict, prefix)
        given = _own_entries(state_dict, prefix)
        if self.layer is not None:
            self.layer.load_experts(given, prefix, self.form)
        left = {name: tensor for name, tensor in state_dict.items() if name.removeprefix(prefix) not in given}
        super()._load_from_state_dict(left, prefix, *arguments)


def _own_entries(state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries below ``prefix`` that are not of a layer of moe-core."""
    below = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
    return {name: tensor for name, tensor in below.items() if not name.startswith("layer.")}


def _guard() -> None:
    """Make PEFT and transformers refuse operations that would silently omit such experts."""
    guard_adapters()
    guard_saving()


def form_of(module: nn.Module) -> ExpertsForm:
    """Return the tensor layout of an experts module of transformers.

    Args:
        module: experts module.
    """
    return ExpertsForm(
        transposed=bool(getattr(module, "is_transposed", False)),
        interleaved=not getattr(module, "is_concatenated", True),
    )


def run_experts(layer: FusedMoELayer, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute :meth:`MoeCoreExperts.forward` with any number of experts per token.

    Args:
        layer: layer of moe-core.
        hidden_states: [..., K].
        top_k_index: int64 [..., k].
        top_k_weights: [..., k].

    Returns:
        Output of the shape of ``hidden_states``.
    """
    chosen, k = top_k_index.shape[-1], layer.config.top_k
    if top_k_index.dim() != 2 or top_k_weights.dim() != 2:
        top_k_index, top_k_weights = top_k_index.reshape(-1, chosen), top_k_weights.reshape(-1, chosen)
    if chosen != k and top_k_weights.shape == top_k_index.shape:
        # -1 selects no expert
        some_ids = torch.split(nn.functional.pad(top_k_index, (0, -chosen % k), value=-1), k, dim=1)
        some_weights = torch.split(nn.functional.pad(top_k_weights, (0, -chosen % k)), k, dim=1)
        parts = [
            layer(hidden_states, topk_weights=weights, topk_ids=ids)
            for ids, weights in zip(some_ids, some_weights, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0, dtype=torch.float32).to(parts[0].dtype)
    output: Tensor = layer(hidden_states, topk_weights=top_k_weights, topk_ids=top_k_index)
    return output


def share_workspaces(layers: Iterable[FusedMoELayer]) -> None:
    """Share one workspace per GPU among all layers of a model.

    Only one call of the model may then run at a time. A layer that already has a workspace keeps it, since captured
    CUDA graphs may write to it.

    Args:
        layers: layers of one model.
    """
    by_device: dict[torch.device, list[FusedMoELayer]] = {}
    for layer in layers:
        if layer.kernel.workspace is None:
            by_device.setdefault(layer.weights.device, []).append(layer)
    for device, there in by_device.items():
        if device.type != "cpu":
            share_workspace(there, 1)
