"""Helpers for implementing a ``moe`` subcommand that another package adds.

They add to the names of :mod:`moe_core`. ``run(arguments)`` returns the exit code: 0 for success, 1 for a failed
comparison, 2 if the request cannot be fulfilled. A :class:`moe_core.MoEError` raised by it becomes one paragraph on
stderr and exit code 2. The arguments of the command are declared with :mod:`moe_core.api.command_line`.

Names change meaning or are removed only with a new major version of :data:`moe_core.INTERFACE_API`.
"""

from __future__ import annotations

from moe_core.cli._arguments import activation_key_of, device_of, dtype_of
from moe_core.cli._output import bytes_text, duration, emit, progress, seconds_since

__all__ = [
    "activation_key_of",
    "bytes_text",
    "device_of",
    "dtype_of",
    "duration",
    "emit",
    "progress",
    "seconds_since",
]
