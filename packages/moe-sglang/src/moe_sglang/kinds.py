"""Mapping of SGLang's flags to schemes and quant keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from moe_core import (
    ConfigError,
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kInt4Static,
    kInt4StaticAsym,
    kInt8DynamicTokenSym,
    kInt8Static,
    kInt8StaticAsym,
    kInt8StaticChannelSym,
)

#: mutually exclusive flags; one is set for quantized experts
FLAGS = ("use_mxfp8", "use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")


@dataclass(frozen=True)
class Kind:
    """Scheme and quant keys, with group sizes and scale dtypes filled in.

    Attributes:
        scheme: scheme of moe-core.
        weight_key: quantization of the weights.
        activation_key: quantization of the activations; None for 16-bit activations.
        static: activation key to use if the checkpoint has activation scales.
    """

    scheme: str
    weight_key: QuantKey
    activation_key: QuantKey | None
    static: QuantKey | None = None


#: (flag, granularity of the scales: "block", "channel", "tensor", or "group" with or without zero points) -> meaning
KINDS = {
    ("use_fp8_w8a8", "block"): Kind("fp8", kFp8Static128BlockSym, kFp8Dynamic128Sym),
    ("use_fp8_w8a8", "channel"): Kind("fp8", kFp8StaticChannelSym, kFp8DynamicTokenSym, kFp8StaticTensorSym),
    ("use_fp8_w8a8", "tensor"): Kind("fp8", kFp8StaticTensorSym, kFp8DynamicTensorSym, kFp8StaticTensorSym),
    # SGLang's kernel quantizes activations per token, regardless of the scales
    ("use_int8_w8a8", "channel"): Kind("int8", kInt8StaticChannelSym, kInt8DynamicTokenSym),
    ("use_int8_w8a16", "channel"): Kind("int8", kInt8StaticChannelSym, None),
    ("use_int8_w8a16", "group"): Kind("wna16", kInt8Static, None),
    ("use_int8_w8a16", "group, zero points"): Kind("wna16", kInt8StaticAsym, None),
    ("use_int4_w4a16", "group"): Kind("wna16", kInt4Static, None),
    ("use_int4_w4a16", "group, zero points"): Kind("wna16", kInt4StaticAsym, None),
}


def kind_of(info: Any) -> Kind:
    """Return scheme and keys of a ``TritonMoeQuantInfo``, with its group sizes.

    Args:
        info: SGLang's description of the weights.

    Raises:
        ConfigError: the combination of flags is not supported.
    """
    flags = [flag for flag in FLAGS if getattr(info, flag)]
    if len(flags) != 1:
        raise ConfigError(f"the experts are {' and '.join(flags) or 'not quantized'}")
    granularity = _granularity(info)
    kind = KINDS.get((flags[0], granularity))
    if kind is None:
        raise ConfigError(f"{flags[0]} with scales per {granularity} is not supported by moe-core")
    return _sized(kind, granularity, info)


def _granularity(info: Any) -> str:
    block = info.block_shape
    if block is not None and block[0] > 0:
        return "block"
    if block is not None and block[1] > 0:
        return "group" if info.w13_zp is None else "group, zero points"
    # weight-only kernels without groups read one scale per channel
    return "channel" if info.per_channel_quant or info.use_int8_w8a16 else "tensor"


def _sized(kind: Kind, granularity: str, info: Any) -> Kind:
    weight_key, activation_key = kind.weight_key, kind.activation_key
    if granularity == "block":
        rows, columns = info.block_shape
        weight_key = weight_key.with_group(rows, columns)
        activation_key = None if activation_key is None else activation_key.with_group(1, columns)
    elif granularity.startswith("group"):
        dtype: torch.dtype = info.w13_scale.dtype
        weight_key = weight_key.with_group(1, info.block_shape[1]).with_scale_dtype(dtype)
    if kind.static is not None and info.a13_scale is not None:
        activation_key = kind.static
    return Kind(kind.scheme, weight_key, activation_key)
