"""Element types of quantized tensors and their exact values.

A :class:`QuantDtype` is the *logical* type of one element. :class:`moe_core.spec.quant_key.Packing` describes how
elements are stored (bytes, packed words, order).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from moe_core.errors import check_tensor


class NumberKind(str, Enum):
    """Interpretation of the bits of an element."""

    FLOAT = "float"
    INT = "int"  # two's complement
    UINT = "uint"  # value = code - offset (offset binary) or code - zero point


@dataclass(frozen=True)
class QuantDtype:
    """One logical element type.

    The fields define the exact value of every code, so a package can use its own element types without registering
    them. Floats that torch has no dtype for are sign-magnitude codes with subnormals and the exponent bias of IEEE 754,
    without Inf and NaN.

    Attributes:
        name: Name of the type, e.g. "e4m3".
        kind: Interpretation of the bits.
        bits: Number of bits per element.
        max_value: Largest finite value that quantizers use.
        min_value: Smallest finite value that quantizers use.
        offset: Subtracted from an unsigned code if there is no zero point (8 for ``uint4b8``).
        mantissa_bits: Number of mantissa bits of a float.
        storage: Dtype of a tensor with one element per storage element.
    """

    name: str
    kind: NumberKind
    bits: int
    max_value: float
    min_value: float
    offset: int = 0
    mantissa_bits: int = 0
    storage: torch.dtype = torch.uint8

    def __repr__(self) -> str:
        known = (name for name, value in globals().items() if value is self)
        return next(known, f"QuantDtype({self.name!r})")

    @property
    def magnitudes(self) -> tuple[float, ...]:
        """Values of the codes of a float whose sign bit is 0, ascending."""
        mantissa = self.mantissa_bits
        bias = 2 ** (self.bits - mantissa - 2) - 1
        parts = (divmod(code, 2**mantissa) for code in range(2 ** (self.bits - 1)))
        return tuple(
            (fraction + 2**mantissa * (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias - mantissa)
            for exponent, fraction in parts
        )


FP8_E4M3 = QuantDtype("e4m3", NumberKind.FLOAT, 8, 448.0, -448.0, mantissa_bits=3, storage=torch.float8_e4m3fn)
FP8_E5M2 = QuantDtype("e5m2", NumberKind.FLOAT, 8, 57344.0, -57344.0, mantissa_bits=2, storage=torch.float8_e5m2)
FP4_E2M1 = QuantDtype("e2m1", NumberKind.FLOAT, 4, 6.0, -6.0, mantissa_bits=1)
INT8 = QuantDtype("int8", NumberKind.INT, 8, 127.0, -128.0, storage=torch.int8)
INT4 = QuantDtype("int4", NumberKind.INT, 4, 7.0, -8.0, storage=torch.int8)
UINT8B128 = QuantDtype("uint8b128", NumberKind.UINT, 8, 127.0, -128.0, offset=128)
UINT4B8 = QuantDtype("uint4b8", NumberKind.UINT, 4, 7.0, -8.0, offset=8)
UINT8 = QuantDtype("uint8", NumberKind.UINT, 8, 255.0, 0.0)
UINT4 = QuantDtype("uint4", NumberKind.UINT, 4, 15.0, 0.0)

#: Names that engines use for the weight types of GPTQ-style checkpoints.
INT4_DTYPE = UINT4B8
INT8_DTYPE = UINT8B128

#: Values of the e2m1 codes 0..15 (bit 3 is the sign).
E2M1_VALUES = (*FP4_E2M1.magnitudes, *(-value for value in FP4_E2M1.magnitudes))

#: Smallest amax that dynamic quantizers divide by. Amax is clamped to it before ``scale = amax / max_value``, so that
#: a row of zeros has a finite scale.
AMAX_FLOOR = 1e-10


def e8m0_to_float32(codes: Tensor) -> Tensor:
    """Convert e8m0 scale codes to float32, exactly: ``2**(code - 127)``.

    Code 0 is 2**-127, a float32 subnormal; code 255 is NaN.

    Args:
        codes: uint8 or ``float8_e8m0fnu`` tensor of any shape.

    Returns:
        float32 tensor of the same shape.
    """
    check_tensor("codes", codes)
    if codes.dtype is torch.float8_e8m0fnu:
        codes = codes.view(torch.uint8)
    bits = codes.to(torch.int32)
    # A float32 with exponent field c and no mantissa is 2**(c-127), except for c = 0 (2**-127 = 0x00400000) and 255.
    raw = torch.where(bits == 0, 0x00400000, bits << 23)
    raw = torch.where(bits == 255, 0x7FC00000, raw)
    return raw.to(torch.int32).view(torch.float32)


def is_e8m0(dtype: torch.dtype) -> bool:
    """Whether a tensor dtype can hold e8m0 exponents: ``float8_e8m0fnu`` or uint8.

    Args:
        dtype: The dtype of the tensor.

    Returns:
        True for these two dtypes.
    """
    return dtype in (torch.uint8, torch.float8_e8m0fnu)
