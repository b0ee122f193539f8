"""What a command that another package brings to ``moe`` uses, beside the names of :mod:`moe_core` itself.

``run(arguments)`` returns the exit code: 0 done, 1 a comparison failed, 2 what was asked for can't be done.  A
:class:`moe_core.MoEError` that it raises becomes one paragraph on stderr and exit code 2.  Which arguments the command
takes is said by :mod:`moe_core.api.command_line`.

Names change their meaning, or go, with a new major :data:`moe_core.INTERFACE_API` only.
"""

from __future__ import annotations

from moe_core.cli._arguments import activation_key_of, check_seed, device_of, dtype_of
from moe_core.cli._output import bytes_text, duration, emit, progress, seconds_since

__all__ = [
    "activation_key_of",
    "bytes_text",
    "check_seed",
    "device_of",
    "dtype_of",
    "duration",
    "emit",
    "progress",
    "seconds_since",
]
