"""compressed-tensors: int4 and int8 weights per channel or group, 16-bit or FP8 activations.

========  ===================================  ======================  ==============================================
kind      ``format``                           ``input_activations``   weights
========  ===================================  ======================  ==============================================
W4A16     pack-quantized, int-quantized        null                    int4, symmetric or with zero points
W8A16     pack-quantized; in groups also       null                    int8, symmetric or with zero points
          int-quantized
W4AFP8    int-quantized, pack-quantized,       float8, dynamic per     int4, symmetric
          int4-quantized                       token
========  ===================================  ======================  ==============================================

:mod:`moe_wna16.formats.row_packing` describes the tensors; their dtypes determine which variant applies. ``actorder``
"group" comes with ``weight_g_idx``, the group of each column; "weight" and "static" leave groups in order. int8
activations, and unpacked int8 weights per channel, belong to the scheme int8. One tensor may hold all experts
(gate_up_proj_packed).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import QuantKey, kFp8DynamicTokenSym
from moe_core.api.formats import LayerExperts, QuantArgs, QuantGroup, QuantizedFormat, quant_group

from moe_wna16.formats.packing import BITS
from moe_wna16.formats.row_packing import CompressedTensorsPacking
from moe_wna16.formats.wna16_layout import WNA16Storage

_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "int4-quantized", None)


class CompressedTensorsWNA16Format(QuantizedFormat):
    """Reader of compressed-tensors WNA16; the module docstring describes the quantization config."""

    name = "compressed-tensors pack-quantized"
    quant_methods = ("compressed-tensors",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> WNA16Storage | str:
        group = quant_group(quantization, layer)
        weights = group.weights
        reason = group.reason_against("int", BITS, _FORMATS)
        if reason is not None:
            return reason
        if weights.dynamic is not False:
            return f"{weights.where} is dynamic, expected static"
        size = _group_size(weights)
        if isinstance(size, str):
            return size
        activation = _activation(group)
        if isinstance(activation, str):
            return activation
        ordered = weights.actorder in ("group", "dynamic")
        stored = {suffix for projection in layer.projections for suffix in layer.suffixes(projection)}
        if "packed" in stored and (ordered or not weights.symmetric):
            found = "zero points" if not weights.symmetric else f"actorder {weights.actorder!r}"
            return f"{weights.where} has {found}, which is not read of experts in one tensor (gate_up_proj_packed)"
        if not stored & {"packed", "weight_packed"} and weights.num_bits == 8 and size == -1:
            return f"{group.where} has int8 weights by channel in bytes: those are the scheme int8's"
        packing = CompressedTensorsPacking(weights.num_bits)
        return WNA16Storage(packing, size, weights.symmetric, group.summary, activation, ordered=ordered)


def _group_size(args: QuantArgs) -> int | str:
    """Return the columns per scale, -1 for a whole channel, or why it is not supported."""
    if args.strategy == "channel" or (args.strategy == "group" and args.group_size == -1):
        return -1
    if args.strategy != "group":
        return f"{args.where}: strategy is {args.strategy!r}, expected 'channel' or 'group'"
    if not args.group_size:
        return f"{args.where}: group_size is {args.group_size}, expected the columns of a group"
    return args.group_size


def _activation(group: QuantGroup) -> QuantKey | str | None:
    """Return the activation key, None for 16 bits, or the reason why it is not supported."""
    weights = group.weights
    key = group.activation(lambda key: key == kFp8DynamicTokenSym, "dynamic float8 by token or null")
    if isinstance(key, QuantKey) and (weights.num_bits != 4 or not weights.symmetric):
        found = f"{'' if weights.symmetric else 'asymmetric '}int{weights.num_bits}"
        return f"{group.where} has {found} weights with {group.inputs} activations, expected symmetric int4"
    return key
