"""Refuse to move or convert a module with layers before any of its tensors changes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_core.errors import ConfigError

if TYPE_CHECKING:
    from moe_core.layer.layer import FusedMoELayer


def check_before_apply(kind: type[FusedMoELayer]) -> None:
    """Make ``Module._apply`` check all layers within a module before it changes any tensor.

    ``_apply`` is what ``.to()``, ``.half()`` and ``.cuda()`` call. It converts children one after another, so a layer
    on its own could only refuse after others were converted.

    Args:
        kind: Class of the layers.
    """
    apply: Callable[..., Any] = nn.Module._apply
    within = threading.local()

    @functools.wraps(apply)
    def checked(self: nn.Module, fn: Callable[[Tensor], Tensor], *arguments: Any, **named: Any) -> Any:
        if getattr(within, "checked", False):
            return apply(self, fn, *arguments, **named)
        for module in self.modules():
            if isinstance(module, kind):
                _check(module, fn)
        within.checked = True
        try:
            return apply(self, fn, *arguments, **named)
        finally:
            within.checked = False

    nn.Module._apply = checked  # type: ignore[method-assign]


def _check(layer: FusedMoELayer, fn: Callable[[Tensor], Tensor]) -> None:
    """Raise ConfigError if ``fn``, an argument of ``_apply``, would move or convert the layer."""
    dtype, device = layer.config.dtype, layer.weights.device
    with torch.no_grad():
        probe = fn(torch.empty(0, dtype=dtype, device=device))
    if probe.device != device:
        raise ConfigError(
            f"the layer's weights are laid out for {device} (backend {layer.selection.backend}) and can't be moved "
            f"to {probe.device}: load the layer on that device; nothing was moved"
        )
    if probe.dtype is not dtype:
        raise ConfigError(
            f"the layer takes hidden states in {dtype} (backend {layer.selection.backend}) and can't be converted "
            f"to {probe.dtype}: load it with dtype={probe.dtype}; nothing was converted"
        )
