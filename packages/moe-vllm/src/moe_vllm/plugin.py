"""Entry point that runs when vLLM loads the plug-in."""

from __future__ import annotations

from moe_vllm.engine import ENGINE, LOGGER

#: schemes registered in this process
_brought: tuple[str, ...] = ()


def register() -> None:
    """Register the enabled schemes, once."""
    global _brought
    if not _brought:
        _brought = ENGINE.start(LOGGER, _bring)


def _bring(schemes: tuple[str, ...]) -> None:
    """Replace vLLM's functions.

    ImportError, AttributeError and EngineChanged are raised before any change.
    """
    from moe_vllm import oracles

    oracles.install(schemes)
