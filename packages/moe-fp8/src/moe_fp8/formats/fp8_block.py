"""Block FP8 (``quant_method: fp8``): DeepSeek-V3/R1, Qwen3-*-FP8, transformers.

Per expert and projection: ``weight`` e4m3 [N, K] and ``weight_scale_inv`` [ceil(N/bn), ceil(K/bk)]. Despite its name,
the weight is *multiplied* by that scale. Scales are float32, bfloat16 or e8m0 exponents (``scale_fmt: ue8m0``).
Activations are quantized at run time, in groups of ``bk`` along K. ``activation_scheme: static`` has one
``activation_scale`` per expert and projection instead.

Newer tools stack the experts: ``gate_up_proj`` [E, 2N, K] with ``gate_up_proj_scale_inv``, ``down_proj`` [E, K, N];
some models store both transposed. If a stacked gate and up were quantized as one matrix and N is not divisible by bn,
they share a block. Their scales are then repeated for blocks of ``gcd(N, bn)`` rows, which is exact.

Blocks of 1x32 with e8m0 scales are MXFP8 under this name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from moe_core import GroupShape, is_e8m0, kFp8Dynamic128Sym, kFp8StaticTensorSym, kMxfp8Dynamic
from moe_core.api.formats import LayerExperts, QuantEntries, QuantizedFormat, is_auto_rounds, short

from moe_fp8.formats.fp8_layout import MX_GROUP, Fp8Storage, scale_suffix

_SCALE = "weight_scale_inv"
#: accepted entries, in any letter case, the default first
_ACCEPTED: Mapping[str, tuple[object, ...]] = {
    "fmt": ("e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn"),
    "expert_dtype": ("fp8", None),
    "store_dtype": ("fp8", None),
    "moe_quant_algo": (None, "fp8"),
    "activation_scheme": ("dynamic", "static"),
}
_OF_EXPERTS = ("expert_dtype", "store_dtype", "moe_quant_algo")


class Fp8BlockFormat(QuantizedFormat):
    """Reader of block FP8; the module docstring describes the tensors."""

    name = "FP8 in blocks (DeepSeek-V3, Qwen3-FP8, transformers fine-grained FP8)"
    quant_methods = ("fp8",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Fp8Storage | str:
        reason = reason_against_kind(quantization, layer)
        if reason is not None:
            return reason
        block = QuantEntries(quantization, str(layer.checkpoint.path / "config.json")).block("weight_block_size")
        if block is None:
            return "weight_block_size is null (one scale per tensor), expected [rows, columns]"
        group = GroupShape(*block)
        exponents = quantization.get("scale_fmt") == "ue8m0"
        why = f"one scale per block of {group.row}x{group.col}: weight_block_size"
        static = quantization.get("activation_scheme") == "static"
        if group == MX_GROUP and not static and _has_exponents(layer, exponents):
            return Fp8Storage(group, kMxfp8Dynamic, why, microscaling=True, scale=_SCALE)
        activation = kFp8StaticTensorSym if static else kFp8Dynamic128Sym.with_group(1, group.col)
        return Fp8Storage(group, activation, why, exponent_bytes=exponents, scale=_SCALE)


def reason_against_kind(quantization: Mapping[str, Any], layer: LayerExperts) -> str | None:
    """Return why a config of ``quant_method: fp8`` is not a supported e4m3 ones, or None.

    The expert dtype may also be given at the top level of config.json, next to the quantization config. It is ignored
    for e4m3 weights, such as attention in a model with FP4 experts.

    Args:
        quantization: the checkpoint's quantization config.
        layer: experts of one layer.

    Returns:
        The reason, or None if the weights are e4m3 and the activation scheme is supported.
    """
    if is_auto_rounds(quantization):
        return "the settings are AutoRound's"
    beside = layer.checkpoint.config.get("expert_dtype")
    stored = {layer.dtype(projection, "weight") for projection in layer.projections if layer.has(projection, "weight")}
    for name, accepted in _ACCEPTED.items():
        if name in _OF_EXPERTS and stored == {torch.float8_e4m3fn}:
            continue
        found = quantization.get(name, beside if name == "expert_dtype" else accepted[0])
        if (found.lower() if isinstance(found, str) else found) not in accepted:
            return f"{name} is {short(found)}, expected {' or '.join(map(repr, accepted))}"
    return None


def _has_exponents(layer: LayerExperts, bytes_too: bool) -> bool:
    """Return whether every weight scale is stored as e8m0 exponents."""
    for projection in layer.projections:
        suffix = scale_suffix(layer, projection)
        dtype = None if suffix is None else layer.dtype(projection, suffix)
        if dtype is None or not is_e8m0(dtype) or (dtype.is_floating_point is False and not bytes_too):
            return False
    return True
