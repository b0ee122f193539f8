"""Element types of quantised tensors and their exact values.

A :class:`QuantDtype` is the *logical* type of one element; how elements lie in
memory (bytes, packed words, order) is :class:`moe_core.spec.quant_key.Packing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from moe_core.errors import check_tensor


class NumberKind(str, Enum):
    """What the bits of an element mean."""

    FLOAT = "float"
    INT = "int"  # two's complement
    UINT = "uint"  # value = code - offset (offset binary) or code - zero point


@dataclass(frozen=True)
class QuantDtype:
    """One logical element type.

    ``bits`` per element; ``max_value``/``min_value`` are the largest and
    smallest finite values that quantisers use; ``offset`` is subtracted from
    an unsigned code when no zero point is given (8 for ``uint4b8``).
    """

    name: str
    kind: NumberKind
    bits: int
    max_value: float
    min_value: float
    offset: int = 0

    def __repr__(self) -> str:
        return _BY_NAME.get(self.name, f"QuantDtype({self.name!r})")


FP8_E4M3 = QuantDtype("e4m3", NumberKind.FLOAT, 8, 448.0, -448.0)
FP8_E5M2 = QuantDtype("e5m2", NumberKind.FLOAT, 8, 57344.0, -57344.0)
FP4_E2M1 = QuantDtype("e2m1", NumberKind.FLOAT, 4, 6.0, -6.0)
INT8 = QuantDtype("int8", NumberKind.INT, 8, 127.0, -128.0)
INT4 = QuantDtype("int4", NumberKind.INT, 4, 7.0, -8.0)
UINT8B128 = QuantDtype("uint8b128", NumberKind.UINT, 8, 127.0, -128.0, offset=128)
UINT4B8 = QuantDtype("uint4b8", NumberKind.UINT, 4, 7.0, -8.0, offset=8)
UINT8 = QuantDtype("uint8", NumberKind.UINT, 8, 255.0, 0.0)
UINT4 = QuantDtype("uint4", NumberKind.UINT, 4, 15.0, 0.0)

_BY_NAME = {
    "e4m3": "FP8_E4M3",
    "e5m2": "FP8_E5M2",
    "e2m1": "FP4_E2M1",
    "int8": "INT8",
    "int4": "INT4",
    "uint8b128": "UINT8B128",
    "uint4b8": "UINT4B8",
    "uint8": "UINT8",
    "uint4": "UINT4",
}

#: Names that engines use for the weight types of GPTQ-style checkpoints.
INT4_DTYPE = UINT4B8
INT8_DTYPE = UINT8B128

#: Values of the e2m1 codes 0..15 (bit 3 is the sign).
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

#: Smallest amax that dynamic quantisers divide by, so that a row of zeros has a
#: finite scale: amax is clamped to this before ``scale = amax / max_value``.
AMAX_FLOOR = 1e-10


def e8m0_to_float32(codes: Tensor) -> Tensor:
    """Scales 2**(code - 127) of uint8 e8m0 codes, exact, as float32.

    Code 0 is 2**-127, a float32 subnormal; code 255 is NaN.
    """
    check_tensor("codes", codes)
    if codes.dtype is torch.float8_e8m0fnu:
        codes = codes.view(torch.uint8)
    bits = codes.to(torch.int32)
    # a float32 of exponent field c without mantissa is 2**(c-127), except for c = 0 (2**-127 = 0x00400000) and 255
    raw = torch.where(bits == 0, 0x00400000, bits << 23)
    raw = torch.where(bits == 255, 0x7FC00000, raw)
    return raw.to(torch.int32).view(torch.float32)


def is_e8m0(dtype: torch.dtype) -> bool:
    """Whether a tensor dtype carries e8m0 exponents (as such or as plain bytes)."""
    return dtype in (torch.uint8, torch.float8_e8m0fnu)
