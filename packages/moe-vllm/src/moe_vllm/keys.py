"""Mapping of vLLM's quant keys to moe-core's, by constant names, never by flags or shapes."""

from __future__ import annotations

from typing import Any

import moe_core
import torch
from moe_core import ConfigError, QuantKey
from vllm.model_executor.layers.quantization.utils import quant_utils

#: constants with the same meaning in both; a missing one raises AttributeError when this module is imported
_NAMES = (
    "kFp8StaticTensorSym",
    "kFp8DynamicTensorSym",
    "kFp8StaticChannelSym",
    "kFp8DynamicTokenSym",
    "kFp8Static128BlockSym",
    "kFp8Dynamic128Sym",
    "kMxfp8Static",
    "kMxfp8Dynamic",
    "kMxfp4Static",
    "kInt8StaticChannelSym",
    "kInt8StaticTensorSym",
    "kInt8DynamicTokenSym",
    "kInt8DynamicTensorSym",
)
_KEYS: dict[Any, QuantKey] = {getattr(quant_utils, name): getattr(moe_core, name) for name in _NAMES}

#: constants of integer weights with 16-bit activations, whose group size is in the checkpoint's config; (without zero
#: points, with zero points)
_INTEGERS: dict[Any, tuple[QuantKey, QuantKey]] = {
    getattr(quant_utils, name): (getattr(moe_core, f"kInt{bits}Static"), getattr(moe_core, f"kInt{bits}StaticAsym"))
    for name, bits in (
        ("kInt4Static", 4),
        ("kInt4Static32", 4),
        ("kInt4StaticAsym", 4),
        ("kInt4Static32Asym", 4),
        ("kInt8Static", 8),
    )
}


def quant_key(key: Any) -> QuantKey | None:
    """Return moe-core's key of weights or activations; None for 16 bits.

    Args:
        key: vLLM's key.

    Raises:
        ConfigError: the key is unknown.
    """
    if key is None:
        return None
    if key not in _KEYS:
        raise ConfigError(f"vLLM's {key} is an unknown quant key")
    return _KEYS[key]


def integer_key(key: Any, *, group_size: int, zero_points: bool, scale_dtype: torch.dtype) -> QuantKey:
    """Return moe-core's key of integer weights.

    Args:
        key: vLLM's key.
        group_size: columns per scale, -1 for the whole row.
        zero_points: the weights have zero points.
        scale_dtype: dtype of the scales.

    Raises:
        ConfigError: the key is unknown.
    """
    if key not in _INTEGERS:
        raise ConfigError(f"vLLM's {key} is an unknown integer weight type")
    return _INTEGERS[key][zero_points].with_group(1, group_size).with_scale_dtype(scale_dtype)
