"""AMD Quark: fp8_e4m3 weights per tensor, per channel or per block, and MXFP8.

Per expert and projection ``weight`` e4m3 [N, K] and ``weight_scale``:

- ``per_tensor``: a scalar
- ``per_channel``: [N]
- ``per_block``: [ceil(N/bn), ceil(K/bk)] float32 or e8m0
- ``per_group`` of 32 with ``scale_format: e8m0``: uint8 [N, K/32]

``input_tensors``: null means 16-bit activations. Static per-tensor activations have an ``input_scale``. Dynamic ones
are per tensor, per token (Quark calls it ``per_channel`` or ``per_token``) or in groups. MXFP8 scales are rounded
according to ``scale_calculation_mode``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import PER_CHANNEL, PER_TENSOR, GroupShape
from moe_core.api.formats import LayerExperts, QuantizedFormat, QuarkArgs, quark_layer

from moe_fp8.formats.fp8_layout import E4M3_KINDS, MX_GROUP, Fp8Storage, is_e4m3


class QuarkFp8Format(QuantizedFormat):
    """Reader of Quark FP8; the module docstring describes the tensors."""

    name = "Quark FP8"
    quant_methods = ("quark",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Fp8Storage | str:
        chosen = quark_layer(quantization, layer)
        if isinstance(chosen, str):
            return chosen
        weight = chosen.weight
        if not weight.is_e4m3:
            return f"{weight.where}: dtype is {weight.dtype!r}, expected 'fp8_e4m3'"
        if weight.dynamic:
            return f"{weight.where} is dynamic, expected static"
        mx = weight.is_microscaling
        shape = MX_GROUP if mx else _shape(weight)
        if isinstance(shape, str):
            return shape
        activation = chosen.activation(is_e4m3, f"fp8_e4m3 {E4M3_KINDS}")
        if isinstance(activation, str):
            return activation
        why = f"{weight.scheme} weights: {weight.where}"
        return Fp8Storage(shape, activation, why, microscaling=mx, exponent_bytes=weight.exponents)


def _shape(weight: QuarkArgs) -> GroupShape | str:
    scheme = weight.scheme
    if scheme == "per_tensor":
        return PER_TENSOR
    if scheme == "per_channel":
        return PER_CHANNEL
    if scheme == "per_block":
        return GroupShape(*(weight.block or (128, 128)))
    return f"{weight.where}: qscheme is {scheme!r}, expected 'per_tensor', 'per_channel', 'per_block' or MXFP8"
