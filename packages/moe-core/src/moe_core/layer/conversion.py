"""Refuse to move, convert or load a module with layers before any of its tensors changes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
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


def check_before_load() -> None:
    """Make ``Module.load_state_dict`` check experts of all layers within a module before it changes any tensor.

    It loads modules one after another, so a layer on its own could only refuse after others were loaded. Modules check
    their entries by a method ``check_state_dict(state_dict, prefix)``. Those with hooks that change the state dict are
    checked when their turn comes.
    """
    load: Callable[..., Any] = nn.Module.load_state_dict

    @functools.wraps(load)
    def checked(self: nn.Module, state_dict: Any, *arguments: Any, **named: Any) -> Any:
        for name, module in self.named_modules() if isinstance(state_dict, Mapping) else ():
            if hasattr(module, "check_state_dict") and not module._load_state_dict_pre_hooks:
                module.check_state_dict(state_dict, f"{name}." if name else "")
        return load(self, state_dict, *arguments, **named)

    nn.Module.load_state_dict = checked  # type: ignore[method-assign]


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
