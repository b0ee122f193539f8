"""Errors for models whose experts moe-core does not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import MoEError

#: what transformers does with experts on its own, by the checkpoint's quant_method
_INSTEAD = {
    "fp8": "runs such experts on GPUs from sm89 by kernels that it downloads, and dequantizes them elsewhere",
    "mxfp8": "runs such experts on GPUs from sm89 by kernels that it downloads, and dequantizes them elsewhere",
    "mxfp4": "runs such experts by kernels that it downloads, or dequantizes them where it has none",
    "compressed-tensors": "dequantizes such experts to 16 bits, with the package compressed-tensors",
    "gptq": "leaves such experts at random values, with a warning",
    "awq": "leaves such experts at random values, with a warning",
    "auto-round": "needs the package auto-round, which runs such experts one by one",
    "quark": "needs the package amd-quark",
    "modelopt": "does not know this quant_method, and takes the codes for weights",
}


class RefusedError(MoEError, ValueError):
    """Quantized experts that moe-core does not run, with what transformers would do instead."""

    @staticmethod
    def of(error: MoEError, quantization: Mapping[str, Any]) -> RefusedError:
        """Create the error from another one.

        Args:
            error: the reason.
            quantization: the checkpoint's quantization settings, as in config.json.

        Returns:
            The error with both parts in its message.
        """
        method = quantization.get("quant_method")
        instead = _INSTEAD.get(str(method).removesuffix("_mixed"), "loads the model as it does without this package")
        return RefusedError(
            f"{error.message.rstrip('.')}. Outside of moe_transformers.loading(), transformers {instead}",
            details=error.details,
        )
