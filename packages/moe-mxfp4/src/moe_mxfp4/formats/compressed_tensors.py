"""compressed-tensors (llm-compressor): ``mxfp4-pack-quantized`` experts.

Per expert and projection ``weight_packed`` uint8 [N, K/2], two codes per byte, the even column low, ``weight_scale``
uint8 [N, K/32], e8m0, and for gpt-oss ``bias`` [N]. ``input_activations``:

==============================================  ==============================================
null                                            16-bit activations (MXFP4A16)
float4 in groups of 32, e8m0 scales             MXFP4, scales rounded "even" (MXFP4)
float8 in groups of 32, e8m0 scales             MXFP8
float8 in groups of 128                         e4m3, one scale per token and 128 (MXFP4xFP8)
float8 by token                                 e4m3, one scale per token
float8 by tensor, static                        e4m3, ``input_scale``
==============================================  ==============================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp4DynamicEven,
    kMxfp8Dynamic,
)
from moe_core.api.formats import LayerExperts, QuantizedFormat, quant_group

from moe_mxfp4.formats.mxfp4_layout import Mxfp4Storage
from moe_mxfp4.groups import GROUP

_ACTIVATIONS = {kMxfp4DynamicEven, kMxfp8Dynamic, kFp8Dynamic128Sym, kFp8DynamicTokenSym, kFp8StaticTensorSym}
_EXPECTED = (
    "symmetric float8 in groups of 128 or of 32 with torch.uint8 scales, by token, or static by tensor; or float4 in "
    "groups of 32"
)


class CompressedTensorsMxfp4Format(QuantizedFormat):
    """Reader of compressed-tensors MXFP4; the module docstring describes the tensors."""

    name = "compressed-tensors mxfp4-pack-quantized"
    quant_methods = ("compressed-tensors",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Mxfp4Storage | str:
        group = quant_group(quantization, layer)
        weights = group.weights
        reason = group.reason_against("float", (4,), ("mxfp4-pack-quantized", None))
        if reason is not None:
            return reason
        if not weights.is_microscaling(group.format):
            scales = "" if weights.scale_dtype is None else f" with {weights.scale_dtype} scales"
            return f"{weights.where} is {weights}{scales}, expected groups of {GROUP} with torch.uint8 scales"
        if weights.unusual is not None:
            return weights.unusual
        activation = group.activation(_ACTIVATIONS.__contains__, _EXPECTED)
        if isinstance(activation, str):
            return activation
        return Mxfp4Storage(activation, group.summary, weight="weight_packed")
