"""Silent faults that fused MoE layers have had elsewhere, as tests of every FP8 backend."""

from __future__ import annotations

from moe_core import (
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from moe_kit.known_faults import KnownFaultTests

W8A8 = (
    (kFp8StaticTensorSym, kFp8DynamicTensorSym),
    (kFp8StaticTensorSym, kFp8StaticTensorSym),
    (kFp8StaticTensorSym, kFp8DynamicTokenSym),
    (kFp8StaticChannelSym, kFp8DynamicTokenSym),
    (kFp8Static128BlockSym, kFp8Dynamic128Sym),
    (kMxfp8Static, kMxfp8Dynamic),
)
WEIGHT_ONLY = tuple((key, None) for key in dict.fromkeys(weight for weight, _ in W8A8))


class TestKnownFaults(KnownFaultTests):
    scheme = "fp8"
    keys = (*W8A8, *WEIGHT_ONLY)
