"""INT8 mixture-of-experts scheme for moe-core: INT8 W8A8, W8A16 and W4A8-int8.

The package reserves its name, its dependency on ``moe-core`` and its version.
It holds no kernels yet and registers nothing: ``moe backends`` does not list it.
"""

from __future__ import annotations

__all__: list[str] = []
