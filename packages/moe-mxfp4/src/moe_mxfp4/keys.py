"""Activation quantizations supported with MXFP4 weights."""

from __future__ import annotations

from moe_core import (
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp4Dynamic,
    kMxfp4DynamicDown,
    kMxfp4DynamicEven,
    kMxfp8Dynamic,
    kMxfp8DynamicDown,
    kMxfp8DynamicEven,
)

#: quantized activations, in the order in which a backend's variants are tried if none was requested
ACTIVATIONS: tuple[QuantKey, ...] = (
    kMxfp8Dynamic,
    kFp8DynamicTokenSym,
    kFp8Dynamic128Sym,
    kFp8StaticTensorSym,
    kMxfp4Dynamic,
    kMxfp4DynamicEven,
    kMxfp4DynamicDown,
    kMxfp8DynamicEven,
    kMxfp8DynamicDown,
)
