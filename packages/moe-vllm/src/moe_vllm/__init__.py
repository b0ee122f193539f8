"""moe-core experts for vLLM: a general plug-in that vLLM runs in every process.

vLLM finds it by its entry point.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["register"]


def register() -> None:
    """Register moe-core's experts in this process's vLLM; a second call has no effect.

    One line of vLLM's log reports the result.

    Raises:
        ConfigError: ``MOE_VLLM`` has an unknown value.
    """
    from moe_vllm import plugin

    plugin.register()
