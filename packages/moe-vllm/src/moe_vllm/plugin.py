"""What runs when vLLM loads the plug-in."""

from __future__ import annotations

from moe_vllm.engine import ENGINE, LOGGER

#: schemes that were brought into this process
_brought: tuple[str, ...] = ()


def register() -> None:
    """Bring the switched-on schemes, once."""
    global _brought
    if not _brought:
        _brought = ENGINE.start(LOGGER, _bring)


def _bring(schemes: tuple[str, ...]) -> None:
    """Replace vLLM's functions.  Raises ImportError, AttributeError, EngineChanged before any is replaced."""
    from moe_vllm import oracles

    oracles.install(schemes)
