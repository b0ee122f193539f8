"""Per-tensor FP8 (``quant_method: fp8``): AutoFP8, transformers without block size.

Per expert and projection: ``weight`` e4m3 [N, K] and its scale, a scalar ([], [1]; stacked experts [E] or [E, 1, 1]).
``activation_scheme: static`` adds ``input_scale`` (AutoFP8) or ``activation_scale`` (transformers).

The meaning of ``dynamic`` depends on the tool: AutoFP8 (``weight_scale``) uses one scale over all tokens, transformers
(``weight_scale_inv``) one per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import PER_TENSOR, kFp8DynamicTensorSym, kFp8DynamicTokenSym, kFp8StaticTensorSym
from moe_core.api.formats import LayerExperts, QuantizedFormat

from moe_fp8.formats.fp8_block import reason_against_kind
from moe_fp8.formats.fp8_layout import Fp8Storage, scale_suffix


class Fp8TensorFormat(QuantizedFormat):
    """Reader of per-tensor FP8; the module docstring describes the tensors."""

    name = "FP8 with one scale per tensor (AutoFP8, transformers)"
    quant_methods = ("fp8",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Fp8Storage | str:
        reason = reason_against_kind(quantization, layer)
        if reason is not None:
            return reason
        if quantization.get("weight_block_size") is not None:
            return "weight_block_size is given (one scale per block), expected null"
        why = "one scale per tensor: weight_block_size is null"
        if quantization.get("activation_scheme") == "static":
            return Fp8Storage(PER_TENSOR, kFp8StaticTensorSym, f"{why}; activation_scheme is 'static'")
        by_token = any((scale_suffix(layer, p) or "").endswith("_inv") for p in layer.projections)
        return Fp8Storage(PER_TENSOR, kFp8DynamicTokenSym if by_token else kFp8DynamicTensorSym, why)
