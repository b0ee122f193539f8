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
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp4DynamicEven,
    kMxfp8Dynamic,
)
from moe_core.api.formats import LayerExperts, QuantArgs, QuantizedFormat, quant_group

from moe_mxfp4.formats.mxfp4_layout import Mxfp4Storage
from moe_mxfp4.groups import GROUP

#: (bits, strategy, group size, e8m0 scales, dynamic) of the supported activations
_ACTIVATIONS: dict[tuple[int, str, int | None, bool, bool], QuantKey] = {
    (4, "group", GROUP, True, True): kMxfp4DynamicEven,
    (8, "group", GROUP, True, True): kMxfp8Dynamic,
    (8, "group", 128, False, True): kFp8Dynamic128Sym,
    (8, "token", None, False, True): kFp8DynamicTokenSym,
    (8, "tensor", None, False, False): kFp8StaticTensorSym,
}


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
        if weights.strategy != "group" or weights.group_size != GROUP or not _exponents(weights):
            scales = "" if weights.scale_dtype is None else f" with {weights.scale_dtype} scales"
            return f"{weights.where} is {weights}{scales}, expected groups of {GROUP} with torch.uint8 scales"
        if weights.unusual is not None:
            return weights.unusual
        activation = None if group.inputs is None else _activation(group.inputs)
        if isinstance(activation, str):
            return activation
        return Mxfp4Storage(activation, group.summary, weight="weight_packed")


def _exponents(args: QuantArgs) -> bool:
    """Return whether scales are e8m0 exponents, the only ones for 4 bits in groups of 32."""
    return args.scale_dtype == "torch.uint8" or (args.scale_dtype is None and args.num_bits == 4)


def _activation(args: QuantArgs) -> QuantKey | str:
    """Return the activation key, or the reason why it is not supported."""
    size = args.group_size if args.strategy == "group" else None
    kind = (args.num_bits, args.strategy, size, _exponents(args), args.dynamic is True)
    found = _ACTIVATIONS.get(kind) if args.dynamic in (True, False) else None
    if found is None or args.type != "float" or not args.symmetric:
        return (
            f"{args.where} is {args}, expected symmetric float8 in groups of 128 or of 32 with torch.uint8 scales, by "
            "token, or static by tensor; or float4 in groups of 32"
        )
    return found
