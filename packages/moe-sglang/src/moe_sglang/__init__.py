"""moe-core experts for SGLang: a plug-in that SGLang runs in every process.

SGLang finds it by its entry point.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["register"]


def register() -> None:
    """Register moe-core's experts in this process's SGLang; a second call has no effect.

    One line of the log reports the result.

    Raises:
        ConfigError: ``MOE_SGLANG`` has an unknown value. SGLang logs the error and keeps its own function.
    """
    from moe_sglang import plugin

    plugin.register()
