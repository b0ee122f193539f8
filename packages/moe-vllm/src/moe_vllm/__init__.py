"""The experts of moe-core in vLLM: a general plug-in, which vLLM finds by its entry point and runs in every process."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["register"]


def register() -> None:
    """Bring the experts into this process's vLLM; does nothing the second time.

    One line of vLLM's log says what came of it.  Raises ConfigError where ``MOE_VLLM`` says nothing known.
    """
    from moe_vllm import plugin

    plugin.register()
