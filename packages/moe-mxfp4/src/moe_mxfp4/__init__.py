"""MXFP4 mixture-of-experts scheme for moe-core: MXFP4 weights with bf16, MXFP8 or fp8 activations.

The package reserves its name, its dependency on ``moe-core`` and its version.
It holds no kernels yet and registers nothing: ``moe backends`` does not list it.
"""

from __future__ import annotations

__all__: list[str] = []
