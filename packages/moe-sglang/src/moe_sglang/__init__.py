"""The experts of moe-core in SGLang: a plug-in, which SGLang finds by its entry point and runs in every process."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["register"]


def register() -> None:
    """Bring the experts into this process's SGLang; does nothing the second time.

    One line of the log says what came of it.  Raises ConfigError where ``MOE_SGLANG`` says nothing known, which SGLang
    logs; its own function stays in place then.
    """
    from moe_sglang import plugin

    plugin.register()
