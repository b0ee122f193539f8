"""compressed-tensors: ``int-quantized``, and ``pack-quantized`` with int8 activations.

Per expert and projection, with ``weight_scale`` usually bfloat16:

======  =================================  =============================  ======================================
kind    codes                              ``weight_scale``               ``input_activations``
======  =================================  =============================  ======================================
W8A8    ``weight`` int8 [N, K]             [N, 1]                         int8, dynamic per token
W8A16   ``weight`` int8 [N, K]             [N, 1]                         null
W4A8    ``weight`` int8 [N, K], -8 to 7    [N, 1], or [N, K/g] for        int8, dynamic per token
                                           groups of g = 32, 64 or 128
======  =================================  =============================  ======================================

Activations may have zero points (``symmetric`` false). In packed form the codes are ``weight_packed`` int32
[N, ceil(K * bits / 32)], with 8 or 128 added, the lowest bits first. The scheme wna16 reads packed weights with 16-bit
activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import kInt8DynamicTokenSym
from moe_core.api.formats import LayerExperts, QuantArgs, QuantGroup, QuantizedFormat, quant_group

from moe_int8.formats.int8_layout import Int8Storage

_FORMATS = ("int-quantized", "naive-quantized", "pack-quantized", None)
GROUPS = (32, 64, 128)


class CompressedTensorsInt8Format(QuantizedFormat):
    """Reader of compressed-tensors INT8; the module docstring describes the tensors."""

    name = "compressed-tensors int-quantized"
    quant_methods = ("compressed-tensors",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Int8Storage | str:
        group = quant_group(quantization, layer)
        return group.reason_against("int", (8, 4), _FORMATS) or group.weights.unusual or _storage(group)


def _storage(group: QuantGroup) -> Int8Storage | str:
    weights, inputs = group.weights, group.inputs
    if inputs is None and (weights.num_bits == 4 or group.format == "pack-quantized"):
        return f"{group.where} has int{weights.num_bits} weights with 16-bit activations: those are the scheme wna16's"
    activation = group.activation(lambda key: key.dtype == kInt8DynamicTokenSym.dtype, "dynamic int8 by token")
    if isinstance(activation, str):
        return activation
    size = _group_size(weights)
    if isinstance(size, str):
        return size
    return Int8Storage(weights.num_bits, activation, group.summary, group=size)


def _group_size(args: QuantArgs) -> int | str:
    """Return the columns per scale, -1 for a whole channel, or why it is not supported."""
    if args.strategy == "channel" or (args.strategy == "group" and args.group_size == -1):
        return -1
    if args.num_bits == 8:
        return f"{args.where}: int8 weights have strategy {args.strategy!r}, expected 'channel'"
    if args.strategy != "group":
        return f"{args.where}: int4 weights have strategy {args.strategy!r}, expected 'channel' or 'group'"
    if args.group_size not in GROUPS:
        return f"{args.where}: group_size is {args.group_size}, expected 32, 64 or 128"
    return args.group_size
