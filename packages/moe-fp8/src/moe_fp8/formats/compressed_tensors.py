"""compressed-tensors (llm-compressor): ``float-quantized`` and ``mxfp8-quantized`` experts.

Per expert and projection: ``weight`` e4m3 [N, K] and ``weight_scale``, usually bfloat16:

==================  ==============================  =============================================
weights' strategy   ``weight_scale``                weight key's groups
==================  ==============================  =============================================
tensor              [1]                             per tensor, gate and up separate
channel             [N, 1]                          1 x K
group, float scale  [N, ceil(K/g)]                  1 x g
group, e8m0 scale   [N, K/32] uint8                 MXFP8
block               [ceil(N/bn), ceil(K/bk)]        ``block_structure``; edge blocks may be partial
==================  ==============================  =============================================

``input_activations``: null means 16-bit activations; otherwise static per tensor (``input_scale`` [1]), dynamic per
tensor, per token, in groups of ``group_size``, or MXFP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import (
    PER_CHANNEL,
    PER_TENSOR,
    GroupShape,
)
from moe_core.api.formats import LayerExperts, QuantArgs, QuantGroup, QuantizedFormat, quant_group

from moe_fp8.formats.fp8_layout import E4M3_KINDS, MX_GROUP, Fp8Storage, is_e4m3

_FORMATS = ("float-quantized", "naive-quantized", "mxfp8-quantized", None)


class CompressedTensorsFp8Format(QuantizedFormat):
    """Reader of compressed-tensors FP8 and MXFP8; the module docstring describes the tensors."""

    name = "compressed-tensors float-quantized and mxfp8-quantized"
    quant_methods = ("compressed-tensors",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Fp8Storage | str:
        group = quant_group(quantization, layer)
        return group.reason_against("float", (8,), _FORMATS) or group.weights.unusual or _storage(group)


def _storage(group: QuantGroup) -> Fp8Storage | str:
    weights = group.weights
    mx = weights.is_microscaling(group.format)
    shape = MX_GROUP if mx else _shape(weights)
    if isinstance(shape, str):
        return shape
    activation = group.activation(is_e4m3, f"symmetric float8 {E4M3_KINDS}")
    if isinstance(activation, str):
        return activation
    return Fp8Storage(shape, activation, group.summary, microscaling=mx)


def _shape(args: QuantArgs) -> GroupShape | str:
    if args.strategy == "tensor":
        return PER_TENSOR
    if args.strategy == "channel":
        return PER_CHANNEL
    if args.strategy == "block" and args.block is not None:
        return GroupShape(*args.block)
    if args.strategy == "group" and args.group_size is not None and args.group_size > 0:
        return GroupShape(1, args.group_size)
    if args.strategy in ("block", "group"):
        size = "block_structure" if args.strategy == "block" else "group_size"
        return f"{args.where}: {size} is missing for strategy '{args.strategy}'"
    return f"{args.where}: strategy is {args.strategy!r}, expected 'tensor', 'channel', 'block' or 'group'"
