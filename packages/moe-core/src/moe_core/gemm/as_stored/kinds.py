"""What activations become before they are multiplied."""

from __future__ import annotations

from enum import Enum

from moe_core.errors import ConfigError
from moe_core.quant_key import (
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


class ActivationKind(Enum):
    """Quantised activations are multiplied as bfloat16 numbers, which hold e4m3 and e2m1 times a power of two."""

    PLAIN = None
    #: e4m3, one scale per row, which multiplies the sums
    TOKEN = kFp8DynamicTokenSym
    #: e4m3, one scale for 128 columns of a row, which multiplies the sums of a step
    BLOCK = kFp8Dynamic128Sym
    #: e4m3, one static scale per expert, which multiplies the sums
    EXPERT = kFp8StaticTensorSym
    #: times their scales already
    MXFP8 = kMxfp8Dynamic
    MXFP4 = kMxfp4Dynamic
    #: times their scales already, the largest saturated
    MXFP4_EVEN = kMxfp4DynamicEven
    MXFP4_DOWN = kMxfp4DynamicDown
    MXFP8_EVEN = kMxfp8DynamicEven
    MXFP8_DOWN = kMxfp8DynamicDown

    @staticmethod
    def of(key: QuantKey | None) -> ActivationKind:
        """The kind of an activation key.  Raises ConfigError for other keys."""
        try:
            return ActivationKind(key)
        except ValueError:
            known = ", ".join(str(kind.value) for kind in ActivationKind if kind.value is not None)
            raise ConfigError(f"activations are 16-bit here or {known}; the key is {key}") from None

    @property
    def weighted_first(self) -> bool:
        """Whether router weights on the input change more than scales, so that x has them before it is rounded."""
        return self in (
            ActivationKind.EXPERT,
            ActivationKind.MXFP8,
            ActivationKind.MXFP4,
            ActivationKind.MXFP4_EVEN,
            ActivationKind.MXFP4_DOWN,
            ActivationKind.MXFP8_EVEN,
            ActivationKind.MXFP8_DOWN,
        )
