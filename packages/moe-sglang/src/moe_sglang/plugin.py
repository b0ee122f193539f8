"""Entry point that runs when SGLang loads the plug-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_sglang.engine import ENGINE, LOGGER
from moe_sglang.fused import FusedFunction, names

#: where each layer's runner requests the function that runs its experts
TARGET = "sglang.srt.layers.moe.moe_runner.base.FusedOpPool.get_fused_func"

#: (all-to-all backend, runner) of the function that takes dispatched tokens and returns their experts' sum
REPLACED = ("none", "triton")

#: schemes registered in this process
_brought: tuple[str, ...] = ()


def register() -> None:
    """Register the hook for the enabled schemes, once."""
    global _brought
    if not _brought:
        _brought = ENGINE.start(LOGGER, _bring)


def _bring(schemes: tuple[str, ...]) -> None:
    """Register the hook; ImportError or EngineChanged for missing names come before that."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    names()
    HookRegistry.register(TARGET, get_fused_func, HookType.AROUND)


def get_fused_func(
    original: Callable[..., Any], pool: type, dispatch_name: str, runner_name: str
) -> Callable[..., Any] | None:
    """Return SGLang's function, or a separate :class:`FusedFunction` per layer in its place.

    Args:
        original: SGLang's ``get_fused_func``.
        pool: SGLang's FusedOpPool.
        dispatch_name: all-to-all backend.
        runner_name: name of the runner.
    """
    found: Callable[..., Any] | None = original(pool, dispatch_name, runner_name)
    if found is None or (dispatch_name, runner_name) != REPLACED:
        return found
    return FusedFunction(found, _brought)
