"""What runs when SGLang loads the plug-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_sglang.engine import ENGINE, LOGGER
from moe_sglang.fused import FusedFunction, names

#: where each layer's runner asks for the function that runs its experts
TARGET = "sglang.srt.layers.moe.moe_runner.base.FusedOpPool.get_fused_func"

#: (all-to-all backend, runner) of the function that takes dispatched tokens and gives their experts' sum
REPLACED = ("none", "triton")

#: schemes that were brought into this process
_brought: tuple[str, ...] = ()


def register() -> None:
    """Register the hook for the switched-on schemes, once."""
    global _brought
    if not _brought:
        _brought = ENGINE.start(LOGGER, _bring)


def _bring(schemes: tuple[str, ...]) -> None:
    """Register the hook.  Raises ImportError, EngineChanged, before that, for a name that this needs."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    names()
    HookRegistry.register(TARGET, get_fused_func, HookType.AROUND)


def get_fused_func(
    original: Callable[..., Any], pool: type, dispatch_name: str, runner_name: str
) -> Callable[..., Any] | None:
    """SGLang's function, or for each layer that asks for the replaced one a function of the layer's own."""
    found: Callable[..., Any] | None = original(pool, dispatch_name, runner_name)
    if found is None or (dispatch_name, runner_name) != REPLACED:
        return found
    return FusedFunction(found, _brought)
