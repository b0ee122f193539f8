"""What runs when vLLM loads the plug-in."""

from __future__ import annotations

from moe_core import MoEError

from moe_vllm.engine import ENGINE, LOGGER

#: schemes that were brought into this process
_brought: tuple[str, ...] = ()


def register() -> None:
    """Bring the switched-on schemes, once."""
    global _brought
    if not _brought:
        _brought = ENGINE.start(LOGGER, _bring)


def _bring(schemes: tuple[str, ...]) -> str | None:
    """Replace vLLM's functions; the reason if one of the names that this needs is not there, and nothing is changed."""
    try:
        from moe_vllm import oracles

        oracles.install(schemes)
    except (ImportError, AttributeError, MoEError) as error:
        return f"this vLLM lacks what it needs: {error}"
    return None
