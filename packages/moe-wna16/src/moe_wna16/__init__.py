"""WNA16 mixture-of-experts scheme for moe-core: INT4/INT8 group-quantized weights with 16-bit activations.

The package reserves its name, its dependency on ``moe-core`` and its version.
It holds no kernels yet and registers nothing: ``moe backends`` does not list it.
"""

from __future__ import annotations

__all__: list[str] = []
